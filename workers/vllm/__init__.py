"""vLLM behind the engine seam."""
