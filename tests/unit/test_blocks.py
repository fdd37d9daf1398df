"""Blocks as opaque bytes: every stride, every type, blocks in the first or the second dimension."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from workers.vllm.connector.blocks import BlockCopier, LayoutError  # noqa: E402

NUM_BLOCKS, CHUNK_BLOCKS, LAYERS = 12, 4, 3
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU here")
    return request.param  # type: ignore[no-any-return]


def random_cache(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    size = torch.empty(shape, dtype=dtype).numel() * dtype.itemsize
    return torch.randint(0, 256, (size,), dtype=torch.uint8, device=device).view(dtype).view(shape)


def heads_last(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """[blocks, heads, tokens, width] that lie in memory as [blocks, tokens, heads, width]."""
    blocks, heads, tokens, width = shape
    return random_cache((blocks, tokens, heads, width), dtype, device).transpose(1, 2)


def in_wider_rows(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Every row is followed by something that is not the cache's."""
    return random_cache((*shape[:-1], shape[-1] + 3), dtype, device)[..., 1 : 1 + shape[-1]]


def blocks_outermost_of_all(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """As where the pages of all layers of a block lie together."""
    return random_cache((shape[0], LAYERS, *shape[1:]), dtype, device)[:, 1]


def keys_and_values_apart(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    return random_cache((2, *shape), dtype, device)


Make = Callable[[tuple[int, ...], torch.dtype, str], torch.Tensor]
LAYOUTS: list[Make] = [
    random_cache,
    heads_last,
    in_wider_rows,
    blocks_outermost_of_all,
    keys_and_values_apart,
]
TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.uint8]


def block_of(cache: torch.Tensor, block: int) -> torch.Tensor:
    """Its bytes, whichever dimension counts the blocks."""
    dimension = 0 if cache.shape[0] == NUM_BLOCKS else 1
    return cache.select(dimension, block).contiguous().cpu().view(torch.uint8)


@pytest.mark.parametrize("make", LAYOUTS)
@pytest.mark.parametrize("dtype", TYPES)
def test_what_was_gathered_is_scattered_to_other_blocks_and_nothing_else_changes(
    make: Make, dtype: torch.dtype, device: str
) -> None:
    shape = (NUM_BLOCKS, 2, 4, 8)
    ours = {f"layer {n}": make(shape, dtype, device) for n in range(LAYERS)}
    theirs = {name: make(shape, dtype, device) for name in ours}
    before = {name: cache.clone() for name, cache in theirs.items()}
    source = BlockCopier(ours, NUM_BLOCKS, CHUNK_BLOCKS)
    target = BlockCopier(theirs, NUM_BLOCKS, CHUNK_BLOCKS)
    payload = memoryview(bytearray(source.chunk_bytes))
    taken, given = [7, 8, 2, 11], [5, 1, 6, 0]
    source.gather(taken, payload, source.fence())
    target.scatter(payload, 0, given, target.fence())
    for name in ours:
        for block in range(NUM_BLOCKS):
            expected = (
                block_of(ours[name], taken[given.index(block)])
                if block in given
                else block_of(before[name], block)
            )
            assert torch.equal(block_of(theirs[name], block), expected)


def test_a_part_of_a_chunk_goes_to_the_blocks_that_want_it(device: str) -> None:
    cache = random_cache((NUM_BLOCKS, 2, 4, 8), torch.float32, device)
    copier = BlockCopier({"layer": cache}, NUM_BLOCKS, CHUNK_BLOCKS)
    payload = memoryview(bytearray(copier.chunk_bytes))
    copier.gather([0, 1, 2, 3], payload)
    kept = block_of(cache, 8)
    copier.scatter(payload, 1, [9, 7])
    assert torch.equal(block_of(cache, 9), block_of(cache, 1))
    assert torch.equal(block_of(cache, 7), block_of(cache, 2))
    assert torch.equal(block_of(cache, 8), kept)


def test_a_payload_is_the_blocks_in_order_and_in_each_all_layers(device: str) -> None:
    caches = {
        "wide": random_cache((NUM_BLOCKS, 2, 4, 8), torch.float32, device),
        "narrow": random_cache((NUM_BLOCKS, 2, 4), torch.uint8, device),
    }
    copier = BlockCopier(caches, NUM_BLOCKS, CHUNK_BLOCKS)
    payload = memoryview(bytearray(copier.chunk_bytes))
    blocks = random.Random(1).sample(range(NUM_BLOCKS), CHUNK_BLOCKS)
    copier.gather(blocks, payload)
    expected = b"".join(
        block_of(caches[name], block).numpy().tobytes() for block in blocks for name in ("wide", "narrow")
    )
    assert payload.tobytes() == expected
    assert copier.shape == (CHUNK_BLOCKS, 1, 2 * 4 * 8 * 4 + 2 * 4)


def test_a_block_that_the_kernel_cuts_into_parts_is_one_block() -> None:
    cache = random_cache((NUM_BLOCKS * 3, 2, 4, 8), torch.float32, "cpu")
    copier = BlockCopier({"layer": cache}, NUM_BLOCKS, 1)
    payload = memoryview(bytearray(copier.chunk_bytes))
    copier.gather([5], payload)
    assert payload.tobytes() == cache[15:18].numpy().tobytes()


def test_layers_that_share_their_memory_are_copied_once() -> None:
    cache = random_cache((NUM_BLOCKS, 2, 4, 8), torch.float32, "cpu")
    copier = BlockCopier({"first": cache, "second": cache}, NUM_BLOCKS, CHUNK_BLOCKS)
    assert copier.shape == (CHUNK_BLOCKS, 1, 2 * 4 * 8 * 4)


def test_a_layout_names_what_two_engines_must_have_in_common() -> None:
    shape = (NUM_BLOCKS, 2, 4, 8)

    def layout(
        make: Make, dtype: torch.dtype = torch.float16, name: str = "layer", blocks: int = NUM_BLOCKS
    ) -> str:
        return BlockCopier({name: make((blocks, *shape[1:]), dtype, "cpu")}, blocks, CHUNK_BLOCKS).layout

    plain = layout(random_cache)
    assert plain == layout(random_cache, blocks=NUM_BLOCKS + 5), "the number of blocks is an engine's own"
    assert plain == layout(in_wider_rows) == layout(blocks_outermost_of_all), "so is what lies between them"
    others = [
        layout(heads_last),
        layout(keys_and_values_apart),
        layout(random_cache, torch.bfloat16),
        layout(random_cache, name="another"),
    ]
    assert len({plain, *others}) == 5
    assert plain.startswith("float16/")


@pytest.mark.parametrize(
    ("caches", "message"),
    [
        ({}, "no KV cache"),
        ({"a": torch.zeros(7, 2, 4)}, r"shape \(7, 2, 4\)"),
        ({"a": torch.zeros(NUM_BLOCKS, NUM_BLOCKS, 4)}, "can't be told"),
        ({"a": [torch.zeros(NUM_BLOCKS, 4)]}, "is a list"),
        ({"a": torch.zeros(NUM_BLOCKS, 4, device="meta")}, "meta"),
    ],
)
def test_tensors_in_which_blocks_are_not_found_are_refused(caches: dict[str, object], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        BlockCopier(caches, NUM_BLOCKS, CHUNK_BLOCKS)  # type: ignore[arg-type]


def test_blocks_and_payloads_that_are_not_there_are_refused() -> None:
    copier = BlockCopier({"layer": torch.zeros(NUM_BLOCKS, 2, 4)}, NUM_BLOCKS, CHUNK_BLOCKS)
    payload = memoryview(bytearray(copier.chunk_bytes))
    with pytest.raises(IndexError, match="of 12"):
        copier.gather([0, NUM_BLOCKS], payload)
    with pytest.raises(ValueError, match="payload of"):
        copier.gather(list(range(CHUNK_BLOCKS + 1)), payload)
    with pytest.raises(ValueError, match="payload of"):
        copier.scatter(payload, 2, [1, 2, 3])
