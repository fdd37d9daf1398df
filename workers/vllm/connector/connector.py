"""`MantaConnector`: what vLLM calls, in the scheduler's process and in every worker's."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.request import RequestStatus

from cache_store.client import StoreClient
from cache_store.wire import WIRE_VERSION, Register
from workers.vllm.connector.copying import Origin
from workers.vllm.connector.engine_report import EngineReport, write_report
from workers.vllm.connector.metadata import StepReport, StepWork
from workers.vllm.connector.scheduler_half import SchedulerHalf
from workers.vllm.connector.settings import Settings, read_settings
from workers.vllm.connector.shareable import NotShareableError, check_shareable
from workers.vllm.connector.stats import MantaPromMetrics, MantaStats
from workers.vllm.connector.worker_half import WorkerHalf
from workers.vllm.identity import engine_identity, kv_layout

logger = logging.getLogger(__name__)

# Plain values that vLLM carries for us.
KVConnectorMetadata.register(StepWork)
KVConnectorWorkerMetadata.register(StepReport)


class MantaConnector(KVConnectorBase_V1, SupportsHMA):
    """Has one half, by its role; none where KV is not shared, and then does nothing.

    It supports vLLM's hybrid memory allocator in that it runs beside it; models with more than one kind of KV cache
    are not shared.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Raises SettingsError, and NotShareableError where the settings insist on sharing."""
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        settings = read_settings(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        try:
            check_shareable(vllm_config, kv_cache_config, settings.chunk_tokens)
        except NotShareableError as error:
            # Whichever process notices first: when vLLM does not start, this is how the replica learns why.
            _report(settings, EngineReport(kv_layout(vllm_config), "", False, str(error)))
            if settings.share == "on":
                raise
            logger.warning("%s", error)
            return
        identity = engine_identity(vllm_config, settings.model, settings.chunk_tokens).digest()
        if role is KVConnectorRole.SCHEDULER:
            _report(settings, EngineReport(kv_layout(vllm_config), identity.hex(), True))
            self._scheduler = _scheduler_half(vllm_config, settings, identity)
        else:
            self._worker = _worker_half(vllm_config, settings, identity, kv_cache_config.num_blocks)

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is dropped is a miss later, not an error."""
        return False

    # In the scheduler.

    def on_new_request(self, request: Any) -> None:
        if self._scheduler is not None:
            with self._scheduler.counts.timed():
                self._scheduler.new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._scheduler is None:
            return 0, False
        with self._scheduler.counts.timed():
            tokens = self._scheduler.match(request, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._scheduler is not None:
            with self._scheduler.counts.timed():
                ids = blocks.get_block_ids()[0] if num_external_tokens else ()
                self._scheduler.allocated(request, ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        if self._scheduler is None:
            return StepWork(b"")
        with self._scheduler.counts.timed():
            return self._scheduler.step(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        if self._scheduler is not None:
            with self._scheduler.counts.timed():
                report = connector_output.kv_connector_worker_meta
                self._scheduler.output(
                    report if isinstance(report, StepReport) else None,
                    connector_output.finished_recving or (),
                    connector_output.finished_sending or (),
                    connector_output.invalid_block_ids,
                )

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        if self._scheduler is None:
            return False, None
        with self._scheduler.counts.timed():
            aborted = request.status not in _WELL_ENDED
            return self._scheduler.finished(request, aborted), None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0] if block_ids else [])

    def reset_cache(self) -> bool:
        if self._scheduler is not None:
            self._scheduler.reset()
        return True

    # In a worker.

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        if self._worker is not None:
            self._worker.register(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        if self._worker is not None:
            self._worker.preempt(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._worker is not None:
            work: Any = self._get_connector_metadata()
            self._worker.start(work)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded into a step that runs."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing is saved from a step that runs."""

    def wait_for_save(self) -> None:
        """Blocks are kept until they have been read."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self._worker is None:
            return None, None
        sent, received = self._worker.ended()
        return sent or None, received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_invalid() if self._worker is not None else set()

    def build_connector_worker_meta(self) -> Any:
        return self._worker.take_report() if self._worker is not None else None

    # In both.

    def shutdown(self) -> None:
        for half in (self._scheduler, self._worker):
            if half is not None:
                half.close()

    def get_kv_connector_stats(self) -> MantaStats | None:
        if self._scheduler is None:
            return None
        data = self._scheduler.counts.take()
        return MantaStats(data=data) if data else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> MantaStats:
        return MantaStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> MantaPromMetrics:
        return MantaPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


_WELL_ENDED = (
    RequestStatus.FINISHED_STOPPED,
    RequestStatus.FINISHED_LENGTH_CAPPED,
    RequestStatus.FINISHED_REPETITION,
)


def _report(settings: Settings, report: EngineReport) -> None:
    if settings.report:
        write_report(Path(settings.report), report)


def _scheduler_half(config: Any, settings: Settings, identity: bytes) -> SchedulerHalf:
    register = Register(WIRE_VERSION, settings.engine, identity, world_size=config.parallel_config.world_size)
    store = StoreClient(Path(settings.socket), register)
    return SchedulerHalf(
        settings, identity, config.cache_config.block_size, config.parallel_config.world_size, store
    )


def _worker_half(config: Any, settings: Settings, identity: bytes, num_blocks: int) -> WorkerHalf:
    parallel = config.parallel_config
    origin = Origin(identity, parallel.rank, parallel.world_size, settings.chunk_tokens)
    return WorkerHalf(settings, origin, num_blocks, config.cache_config.block_size)
