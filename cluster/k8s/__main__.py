"""Check folders of manifests: python -m cluster.k8s k8s/overlays/gpu ..."""

from __future__ import annotations

import sys
from pathlib import Path

from cluster.k8s.checks import check
from cluster.k8s.folders import secrets_at, versions_at
from cluster.k8s.kustomize import KustomizeError, render


def main() -> None:
    """Print what is found in the folders that are named; exit code 1 where something is."""
    failed = False
    for name in sys.argv[1:]:
        folder = Path(name)
        try:
            findings = check(render(folder), versions_at(folder), secrets_at(folder))
        except KustomizeError as error:
            sys.exit(str(error))
        failed |= bool(findings)
        lines = [f"{name}: {finding}" for finding in findings] or [f"{name}: nothing found"]
        print(*lines, sep="\n")
    sys.exit(failed)


if __name__ == "__main__":
    main()
