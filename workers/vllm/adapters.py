"""LoRA adapters: clients know them by a public name, vLLM by `name@contenthash`.

vLLM hashes an adapter's blocks by its name, so that two adapters of one name and different weights would share KV.
With the content in the name they can't, in the engine's own prefix cache as little as in ours.
"""

from __future__ import annotations

from typing import Any

from workers.config import ModelConfig
from workers.fingerprint import adapter_hash


def engine_names(model: ModelConfig) -> dict[str, str]:
    """Public name -> name in the engine, for every configured adapter."""
    return {name: f"{name}@{adapter_hash(folder)}" for name, folder in model.adapters.items()}


def publish_names(models: Any, names: dict[str, str]) -> None:
    """Make vLLM's `OpenAIServingModels` answer to public names and show them, where it shows names at all."""
    public = {engine: name for name, engine in names.items()}
    models.lora_requests = {
        public.get(engine, engine): request for engine, request in models.lora_requests.items()
    }
    engine_model_name = models.model_name
    show_models = models.show_available_models

    def model_name(lora_request: Any = None) -> str:
        shown: str = engine_model_name(lora_request)
        return public.get(shown, shown)

    async def show_available_models() -> Any:
        listing = await show_models()
        for card in listing.data:
            card.id = public.get(card.id, card.id)
        return listing

    models.model_name = model_name
    models.show_available_models = show_available_models
