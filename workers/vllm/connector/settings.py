"""What the connector is told through `kv_connector_extra_config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

_Positive = Annotated[float, msgspec.Meta(gt=0)]


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The same in the scheduler and in every worker."""

    socket: str
    """Path of the cache actor's Unix socket."""
    engine: str
    """Replica id."""
    model: str
    """Name of the weights (`workers.fingerprint.model_id`), so that engine processes need not hash them."""
    chunk_tokens: Annotated[int, msgspec.Meta(ge=1)]
    staging_mib: Annotated[int, msgspec.Meta(ge=1)] = 64
    """Shared memory of each worker."""
    share: Literal["on", "auto"] = "on"
    """`auto`: a model whose KV can't be shared is served without; `on`: it is an error."""
    load_when: Literal["faster", "always"] = "faster"
    """`faster`: when measured rates say that loading beats computing."""
    report: str = ""
    """File for the `EngineReport`; none where empty."""
    lookup_limit_s: _Positive = 1.0
    """A request whose look-up takes longer is computed."""
    load_limit_s: _Positive = 10.0
    """A load that takes longer is given up and computed."""
    hold_s: _Positive = 1.0
    """How long the blocks of a finished request may wait for a free slot to be saved from."""


class SettingsError(ValueError):
    """The message names the field, what was found and what is needed."""


def read_settings(extra_config: Mapping[str, Any]) -> Settings:
    """Raises SettingsError."""
    try:
        return msgspec.convert(dict(extra_config), Settings)
    except msgspec.ValidationError as error:
        raise SettingsError(f"kv_connector_extra_config of MantaConnector: {error}") from error
