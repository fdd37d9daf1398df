"""The policy that a configuration names: one of ours, or a class of somebody else's package."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module

from router.choice import Policy
from router.config import PolicyConfig
from router.policies.least_loaded import LeastLoadedPolicy
from router.policies.predicted_ttft import PredictedTtftPolicy
from router.policies.prefix_affinity import PrefixAffinityPolicy
from router.policies.round_robin import RoundRobinPolicy
from router.policies.session import SessionPolicy


class PolicyError(ValueError):
    """A policy that can't be made. The message says what of the configuration to change."""


def _predicted_ttft(config: PolicyConfig) -> Policy:
    weights = config.weights
    return PredictedTtftPolicy(
        behind_weight=weights.behind,
        streams_weight=weights.streams,
        decode_weight=weights.decode,
        room_weight=weights.room,
        output_tokens=weights.output_tokens,
    )


KINDS: Mapping[str, Callable[[PolicyConfig], Policy]] = {
    "predicted_ttft": _predicted_ttft,
    "prefix_affinity": lambda config: PrefixAffinityPolicy(config.weights.request_tokens),
    "least_loaded": lambda config: LeastLoadedPolicy(config.weights.request_tokens),
    "round_robin": lambda config: RoundRobinPolicy(),
    "session": lambda config: SessionPolicy(),
}


def policy_from(config: PolicyConfig) -> Policy:
    """Raises PolicyError for a class that can't be imported, can't be made of its options, or is no policy."""
    make = KINDS.get(config.kind)
    if make is not None:
        return make(config)
    module_name, _, class_name = config.kind.partition(":")
    asked = f"router.policy.kind is {config.kind!r}"
    try:
        kind = getattr(import_module(module_name), class_name)
    except ImportError as error:
        raise PolicyError(
            f"{asked}: {error}; needed: a module that the routers can import, or one of {', '.join(KINDS)}"
        ) from error
    except AttributeError as error:
        raise PolicyError(f"{asked}: the module {module_name} has no {class_name}") from error
    try:
        policy = kind(**config.options)
    except Exception as error:
        raise PolicyError(
            f"{asked}: {class_name} can't be made of router.policy.options "
            f"{sorted(config.options)}: {type(error).__name__}: {error}"
        ) from error
    if not callable(getattr(policy, "choose", None)):
        raise PolicyError(
            f"{asked}: {class_name} has no method `choose`; needed: router.choice.Policy's choose(request, candidates)"
        )
    return policy  # type: ignore[no-any-return]
