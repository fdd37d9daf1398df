"""vLLM's NIXL connector, which also lets go of what nobody will fetch, and leaves alone what may be gone.

Two things are added, and nothing of the transfer itself is touched:

- A request that says `RELEASE` in its transfer parameters, and is aborted on arrival, frees the blocks kept for the
  request that it names. Left alone vLLM keeps them until the lease ends, half a minute.
- A prompt is not fetched after `FETCH_UNTIL`. vLLM reads the blocks that it was once told of, whoever has them now.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnector as VllmNixlConnector

from workers.vllm.nixl import FETCH_UNTIL, RELEASE

_FETCHING = "do_remote_prefill"


class NixlContractError(RuntimeError):
    """This vLLM's NIXL connector is not the one that this was written for."""


class NixlConnector(VllmNixlConnector):
    """Named as vLLM's own, which it makes allowances for by name."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Raises NixlContractError."""
        super().__init__(vllm_config, role, kv_cache_config)
        self._to_release: list[str] = []
        if role is KVConnectorRole.WORKER:
            worker = self.connector_worker
            _check_contract(worker)
            worker._get_new_notifs = self._with_released(worker._get_new_notifs)

    # In the scheduler.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        params = request.kv_transfer_params
        if params and params.get(_FETCHING) and time.monotonic() >= params.get(FETCH_UNTIL, float("inf")):
            params[_FETCHING] = False
        found: tuple[int | None, bool] = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return found

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        if self._released(request):
            return False, None
        finished: tuple[bool, dict[str, Any] | None] = super().request_finished(request, block_ids)
        return finished

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self._released(request):
            return False, None
        finished: tuple[bool, dict[str, Any] | None] = super().request_finished_all_groups(request, block_ids)
        return finished

    def _released(self, request: Any) -> bool:
        name = (request.kv_transfer_params or {}).get(RELEASE)
        if name is None:
            return False
        self._to_release.append(name)
        return True

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        metadata = super().build_connector_meta(scheduler_output)
        metadata.manta_released, self._to_release = self._to_release, []
        return metadata

    # In a worker.

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        metadata: Any = self._get_connector_metadata()
        self._to_release += metadata.manta_released

    def _with_released(self, get_notified: Callable[[], set[str]]) -> Callable[[], set[str]]:
        """Requests that others have fetched, and those that nobody will: both are done with."""
        worker = self.connector_worker

        def notified() -> set[str]:
            done = get_notified()
            for name in self._to_release:
                # One that was fetched, or whose lease has ended, is not there any more.
                if worker._reqs_to_send.pop(name, None) is not None:
                    worker._reqs_to_process.discard(name)
                    worker.consumer_notification_counts_by_req.pop(name, None)
                    worker.expected_consumer_notifications_by_req.pop(name, None)
                    done.add(name)
            self._to_release.clear()
            return done

        return notified


_WORKER_STATE = (
    "_reqs_to_send",
    "_reqs_to_process",
    "consumer_notification_counts_by_req",
    "expected_consumer_notifications_by_req",
)


def _check_contract(worker: Any) -> None:
    missing = [name for name in _WORKER_STATE if not hasattr(worker, name)]
    if missing or not inspect.ismethod(getattr(worker, "_get_new_notifs", None)):
        import vllm

        raise NixlContractError(
            f"vLLM {vllm.__version__}: {type(worker).__name__} has no {', '.join(missing) or '_get_new_notifs'}"
        )
