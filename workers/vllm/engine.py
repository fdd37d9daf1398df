"""`VllmEngine`: a real vLLM engine and its OpenAI server behind the seam."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from starlette.types import ASGIApp

from cache_store.config import CacheConfig
from cache_store.keys import EngineIdentity
from workers.admissions import Admissions
from workers.config import EngineConfig, ModelConfig
from workers.cores import CoreLease, lease_cores, running_on, split_cores
from workers.engine import EngineInfo, EngineLoad, EngineUnhealthyError
from workers.handover import Handover
from workers.kv_events import KVEventSink
from workers.placement import ranks
from workers.store_address import StoreAddress
from workers.transfer import Transfer, TransferConfig
from workers.vllm.events import EventReader
from workers.vllm.transfer_config import NAME

logger = logging.getLogger(__name__)

_THREADS_BIND = "VLLM_CPU_OMP_THREADS_BIND"


_FOLDER_PREFIX = "manta-engine-"


class VllmEngine:
    """See `workers.engine.Engine`. GPUs are what the process sees."""

    app: ASGIApp
    info: EngineInfo

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        cache: CacheConfig,
        cores: int = 0,
        store: StoreAddress | None = None,
        transfer: TransferConfig | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        """`cores`: how many an engine on the CPU has to itself; 0 leaves it on any. `store`: where KV is shared,
        unless `cache.share` is off. `transfer`: None where no prompt is computed by one engine for another. `host`:
        address at which other engines reach this one."""
        self._config = config
        self._model = model
        self._cache = cache
        self._cores = cores
        self._store = store if cache.share != "off" else None
        self._admissions = Admissions() if self._store is not None else None
        self._transfer = transfer if transfer is not None and transfer.kind != "off" else None
        self._host = host
        self._nixl_args: dict[str, Any] | None = None
        self._no_transfer = ""
        self._lease: CoreLease | None = None
        self._folder: Path | None = None
        self._llm: Any = None
        self._reader: asyncio.Task[None] | None = None
        self._stats = _LastStats(self._admissions)
        self._answered_at = time.monotonic()
        self._probe: asyncio.Task[Any] | None = None

    async def start(self, sink: KVEventSink) -> None:
        os.environ.update(self._config.env)
        await asyncio.to_thread(self._prepare_transfer)
        cores = await asyncio.to_thread(self._take_cores)
        self._folder = _socket_folder()
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.app import build_app

        from workers.vllm.adapters import engine_names, publish_names
        from workers.vllm.arguments import parse_engine_args
        from workers.vllm.identity import weights_of
        from workers.vllm.llm import ObservedLLM
        from workers.vllm.prompt_adapter import install

        names = engine_names(self._model)
        revision = self._config.args.get("revision")
        weights = await asyncio.to_thread(weights_of, self._model.path, revision)
        extra = self._extra_args(names) + self._store_args(weights)
        args = parse_engine_args(self._model.path, self._model.served_name, self._args, extra)
        # vLLM's uni executor binds no threads at all.
        with running_on(cores), self._explained():
            self._llm = ObservedLLM.from_engine_args(
                AsyncEngineArgs.from_cli_args(args), stat_loggers=[self._stats.factory]
            )
        self._llm.observe(self._admissions, self._transfer.hold_s if self._transfer is not None else 0.0)
        install(self._llm.renderer)
        self._reader = asyncio.create_task(EventReader(*self._endpoints(), sink).run())
        tasks = await self._llm.get_supported_tasks()
        app = build_app(args, tasks, self._llm.model_config)
        await init_app_state(self._llm, app.state, args, tasks)
        if names:
            publish_names(app.state.openai_serving_models, names)
        self.app = app
        self.info = self._describe(weights, names)
        self._answered_at = time.monotonic()

    def _prepare_transfer(self) -> None:
        """Raises RuntimeError where NIXL is insisted on and can't start."""
        if self._transfer is None:
            return
        from workers.vllm.nixl import side_channel, why_no_nixl

        # Our own connector tells what became of a transfer, and there is none where nothing is shared.
        reason = why_no_nixl(self._transfer.backends) if self._store is not None else "cache.share is off"
        if not reason:
            os.environ.update(side_channel(self._host, self._config.env))
            return
        if self._transfer.kind == "nixl":
            raise RuntimeError(f"transfer.kind is nixl, and KV can't be handed over by NIXL here: {reason}")
        logger.warning(
            "KV can't be handed over by NIXL here (%s): this replica computes prompts itself, or loads them from the "
            "store",
            reason,
        )
        self._transfer, self._no_transfer = None, reason

    @property
    def _args(self) -> dict[str, Any]:
        """vLLM's arguments, with what moves KV between engines."""
        if self._transfer is None:
            return self._config.args
        from workers.vllm.nixl import with_nixl

        if self._nixl_args is None:
            self._nixl_args = with_nixl(self._config.args, self._transfer, self._platform())
        return self._nixl_args

    @staticmethod
    def _platform() -> str:
        from vllm.platforms import current_platform

        return str(current_platform.device_type)

    def _take_cores(self) -> tuple[int, ...]:
        """Empty for an engine that runs on GPUs, and where the configuration binds the threads itself."""
        from vllm.platforms import current_platform

        if not self._cores or _THREADS_BIND in self._config.env or not current_platform.is_cpu():
            return ()
        self._lease = lease_cores(self._cores)
        groups = split_cores(self._lease.cores, ranks(self._config))
        os.environ[_THREADS_BIND] = "|".join(",".join(map(str, group)) for group in groups)
        os.environ.setdefault("OMP_NUM_THREADS", str(len(groups[0])))
        return self._lease.cores

    def _endpoints(self) -> tuple[str, str]:
        return f"ipc://{self._folder}/events", f"ipc://{self._folder}/replay"

    def _extra_args(self, adapters: dict[str, str]) -> list[str]:
        """What the cluster needs from vLLM, on top of what the configuration asks for."""
        endpoint, replay = self._endpoints()
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": endpoint,
            "replay_endpoint": replay,
        }
        extra = ["--kv-events-config", json.dumps(events), "--enable-prompt-tokens-details"]
        if adapters:
            extra += ["--enable-lora", "--lora-modules"]
            extra += [f"{engine}={self._model.adapters[name]}" for name, engine in adapters.items()]
        return extra

    def _store_args(self, weights: str) -> list[str]:
        if self._store is None:
            return []
        from workers.vllm.transfer_config import register_connector, transfer_config

        register_connector()
        extra_config = {
            "socket": self._store.socket,
            "engine": self._store.engine,
            "model": weights,
            "chunk_tokens": self._cache.chunk_tokens,
            "staging_mib": self._cache.staging_mib,
            "share": self._cache.share,
            "load_when": self._store.load_when,
            "report": str(self._report_file),
        }
        return ["--kv-transfer-config", json.dumps(transfer_config(self._args, extra_config))]

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """vLLM says of a failed start only that it failed. Raises NotShareableError where that was the reason."""
        from workers.vllm.connector.engine_report import read_report
        from workers.vllm.connector.shareable import NotShareableError

        try:
            yield
        except Exception as error:
            report = read_report(self._report_file)
            if report is not None and not report.sharing and self._cache.share == "on":
                raise NotShareableError(report.reason) from error
            raise

    @property
    def _report_file(self) -> Path:
        assert self._folder is not None
        return self._folder / "report.json"

    def _describe(self, weights: str, adapters: dict[str, str]) -> EngineInfo:
        """Raises RuntimeError when the engine's processes would know KV by other names than this one."""
        from workers.vllm.connector.engine_report import read_report
        from workers.vllm.identity import engine_identity

        config = self._llm.vllm_config
        report = read_report(self._report_file)
        layout = report.layout if report is not None else None
        identity = engine_identity(config, weights, self._cache.chunk_tokens, layout)
        if report is not None and report.sharing and report.identity != identity.digest().hex():
            raise RuntimeError(
                f"the engine's identity is {report.identity} in its own process and {identity.digest().hex()} here: "
                f"{identity}"
            )
        return EngineInfo(
            identity=identity,
            block_tokens=config.cache_config.block_size,
            max_model_len=config.model_config.max_model_len,
            models=(self._model.served_name, *adapters),
            adapters=adapters,
            transfer=self._describe_transfer(identity),
            no_transfer=self._no_transfer,
        )

    def _describe_transfer(self, identity: EngineIdentity) -> Transfer | None:
        if self._transfer is None:
            return None
        from workers.vllm.identity import transfer_of

        return transfer_of(self._llm.vllm_config, identity)

    async def release(self, handover: Handover) -> None:
        from workers.vllm.nixl import RELEASE

        await self._llm.notify_kv_transfer_request_rejected(
            f"release-{uuid.uuid4().hex}", {RELEASE: handover.request}
        )

    async def check_health(self) -> None:
        try:
            await self._check()
        except EngineUnhealthyError:
            self._leave_cores(True)
            raise
        self._leave_cores(False)

    def _leave_cores(self, leaving: bool) -> None:
        if self._lease is not None:
            self._lease.leave(leaving)

    async def _check(self) -> None:
        if self._llm is None:
            raise EngineUnhealthyError("the engine has not started")
        if self._llm.errored:
            raise EngineUnhealthyError(f"the engine core is dead: {self._llm.dead_error}")
        if self._reader is not None and self._reader.done():
            raise EngineUnhealthyError(f"the KV event reader stopped: {self._reader.exception()!r}")
        # The core answers between two steps, so an answer means that steps still end.
        if self._probe is None or self._probe.done():
            if self._probe is not None and not self._probe.cancelled() and self._probe.exception() is None:
                self._answered_at = time.monotonic()
            self._probe = asyncio.create_task(self._ask_core())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._probe), timeout=1.0)
        silent = time.monotonic() - self._answered_at
        if silent > self._config.stuck_after_s:
            raise EngineUnhealthyError(
                f"the engine core has answered nothing for {silent:.0f} s (limit {self._config.stuck_after_s:.0f} s)"
            )

    async def _ask_core(self) -> None:
        await self._llm.is_sleeping()
        self._answered_at = time.monotonic()

    def load(self) -> EngineLoad:
        stats = self._stats
        return EngineLoad(
            waiting=stats.waiting,
            running=stats.running,
            kv_used=stats.kv_used,
            prefill_rate=self._llm.prefill_rate.rate,
            decode_rate=self._llm.decode_rate.rate,
        )

    async def shutdown(self) -> None:
        self._leave_cores(True)
        for task in (self._reader, self._probe):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        if self._llm is not None:
            llm, self._llm = self._llm, None
            await asyncio.to_thread(llm.shutdown)
        if self._lease is not None:
            self._lease.release()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def _socket_folder() -> Path:
    """For this process's sockets, in a short path. What engines left that were killed is removed first."""
    for left in Path(tempfile.gettempdir()).glob(f"{_FOLDER_PREFIX}*"):
        owner = left.name.removeprefix(_FOLDER_PREFIX).partition("-")[0]
        if owner.isdigit() and not psutil.pid_exists(int(owner)):
            shutil.rmtree(left, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{_FOLDER_PREFIX}{os.getpid()}-"))


class _LastStats:
    """Keeps the scheduler's latest numbers. vLLM makes loggers itself, through `factory`."""

    def __init__(self, admissions: Admissions | None = None) -> None:
        self.admissions = admissions
        self.waiting = 0
        self.running = 0
        self.kv_used = 0.0

    def note_connector(self, counts: Any) -> None:
        """`counts` of our connector, or by name of several."""
        if self.admissions is not None and counts:
            self.admissions.note(counts.get(NAME, counts))

    def factory(self, vllm_config: Any, engine_index: int = 0) -> Any:
        from vllm.v1.metrics.loggers import StatLoggerBase

        keeper = self

        class Logger(StatLoggerBase):
            def __init__(self) -> None: ...

            def record(self, scheduler_stats: Any, *args: Any, **kwargs: Any) -> None:
                if scheduler_stats is not None:
                    keeper.waiting = scheduler_stats.num_waiting_reqs
                    keeper.running = scheduler_stats.num_running_reqs
                    keeper.kv_used = scheduler_stats.kv_cache_usage
                    keeper.note_connector(scheduler_stats.kv_connector_stats)

            def log_engine_initialized(self) -> None: ...

        return Logger()
