"""The architecture: what the pure core must not load, and which package may know which."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("cache_store", "workers", "router", "cluster")

PURE = (
    "cache_store.admission",
    "cache_store.cache_messages",
    "cache_store.chunk",
    "cache_store.chunk_path",
    "cache_store.client",
    "cache_store.config",
    "cache_store.disk",
    "cache_store.events",
    "cache_store.eviction",
    "cache_store.keys",
    "cache_store.leases",
    "cache_store.load_cost",
    "cache_store.memory_budget",
    "cache_store.node_store",
    "cache_store.quota",
    "cache_store.remote",
    "cache_store.staging",
    "cache_store.store_socket",
    "cache_store.stream",
    "cache_store.tier_health",
    "cache_store.wire",
    "workers.config",
    "workers.kv_events",
    "workers.admissions",
    "workers.handover",
    "workers.handovers",
    "workers.messages",
    "workers.open_requests",
    "workers.prompt_keys",
    "workers.request_record",
    "workers.store_address",
    "workers.transfer",
    "workers.vllm.connector.counts",
    "workers.vllm.connector.lookups",
    "workers.vllm.connector.mover",
    "workers.vllm.connector.requests",
    "workers.vllm.connector.scheduler_half",
    "router.config",
    "router.admission",
    "router.ahead",
    "router.calibration",
    "router.candidates",
    "router.choice",
    "router.decision_log",
    "router.disaggregation",
    "router.errors",
    "router.fleet",
    "router.holdings",
    "router.index",
    "router.known_speeds",
    "router.ledger",
    "router.loadable",
    "router.metrics",
    "router.others_load",
    "router.pairing",
    "router.plan",
    "router.prefill_config",
    "router.policies",
    "router.prediction",
    "router.recent",
    "router.render",
    "router.session",
    "router.speed",
    "router.tenants",
    "cluster.config",
    "cluster.k8s.checks",
    "cluster.k8s.export",
    "cluster.k8s.kustomize",
    "cluster.simulate_cli",
    "cluster.simulation.study",
)
HEAVY = ("ray", "vllm", "torch", "transformers", "aiohttp")

CACHE_STORE = (
    "cache_store.app_server",
    "cache_store.cache_messages",
    "cache_store.chunk",
    "cache_store.client",
    "cache_store.config",
    "cache_store.event_endpoint",
    "cache_store.events",
    "cache_store.keys",
    "cache_store.load_cost",
    "cache_store.node_actor",
    "cache_store.node_address",
    "cache_store.node_errors",
    "cache_store.staging",
    "cache_store.store_stats",
    "cache_store.stream",
    "cache_store.wire",
)
# What a package may import of the others: these modules and what is below them.
ALLOWED: dict[str, tuple[str, ...]] = {
    "cache_store": (),
    "workers": CACHE_STORE,
    "router": (*CACHE_STORE, "workers.messages"),
    "cluster": PACKAGES,
}


@pytest.mark.parametrize("module", PURE)
def test_the_pure_core_loads_no_engine_and_no_cluster(module: str) -> None:
    program = (
        f"import sys, {module}\n"
        f"print(*sorted({{name.partition('.')[0] for name in sys.modules}} & set({HEAVY!r})))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert loaded.returncode == 0, loaded.stderr
    assert loaded.stdout.split() == []


def imports(path: Path) -> set[str]:
    """Dotted names that a file imports, wherever in it: for `from a import b` that is `a.b`."""
    package = ".".join(path.relative_to(ROOT).with_suffix("").parts[:-1])
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*parents, *([node.module] if node.module else [])])
            found |= {f"{module}.{alias.name}" for alias in node.names}
    return found


def is_below(name: str, allowed: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in allowed)


@pytest.mark.parametrize("package", PACKAGES)
def test_arrows_between_packages_point_one_way(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    allowed = (package, *ALLOWED[package])
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in files
        for name in sorted(imports(path))
        if name.partition(".")[0] in PACKAGES and not is_below(name, allowed)
    ]
    assert wrong == []


def test_imports_are_found_wherever_they_stand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    path = tmp_path / "router" / "deep" / "module.py"
    path.parent.mkdir(parents=True)
    path.write_text(
        "import cluster.app as x\n"
        "def f():\n    from workers import replica\n"
        "from ..index import PrefixIndex\n"
        "from . import sibling\n"
    )
    assert imports(path) == {
        "cluster.app",
        "workers.replica",
        "router.index.PrefixIndex",
        "router.deep.sibling",
    }
