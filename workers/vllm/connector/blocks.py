"""Whole blocks of an engine's KV cache as opaque bytes, whatever the strides of the tensors that hold them.

A payload holds the blocks of a chunk one behind the other, and in each block all layers in the order in which the
engine registered them. What a layer's tensor means is never asked: the elements of a block are taken in the tensor's
own order, and two engines understand each other only when their `layout` is equal, which names every layer with the
shape, type and memory order of its blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from blake3 import blake3

_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class LayoutError(ValueError):
    """KV cache tensors in which whole blocks can't be found. The message says what was found."""


@dataclass(frozen=True)
class Layer:
    name: str
    blocks: torch.Tensor
    """A view of the engine's tensor: blocks first, elements as integers of their size."""
    offset: int
    """Of the layer's bytes in a block of a payload."""
    nbytes: int
    """Of one block."""
    dtype: str
    """Of the elements as the engine sees them."""


class BlockCopier:
    """Moves blocks between the engine's KV cache and payloads.

    Its methods return when the bytes are there. One thread at a time; on CUDA the copies run on a stream of their own,
    behind what `fence` marked.
    """

    def __init__(self, caches: Mapping[str, torch.Tensor], num_blocks: int, chunk_blocks: int) -> None:
        """`caches`: the tensors that vLLM registers, by layer; `num_blocks`: as its block table counts them.

        Raises LayoutError.
        """
        if not caches:
            raise LayoutError("the engine has registered no KV cache")
        self.layers = tuple(_layers(caches, num_blocks))
        self.block_bytes = sum(layer.nbytes for layer in self.layers)
        self.chunk_blocks = chunk_blocks
        self.num_blocks = num_blocks
        devices = {layer.blocks.device for layer in self.layers}
        if len(devices) != 1:
            raise LayoutError(f"the KV cache is spread over {', '.join(sorted(map(str, devices)))}")
        device = devices.pop()
        if device.type not in ("cpu", "cuda"):
            raise LayoutError(f"the KV cache is on {device}; needed: cpu or cuda")
        self._device: _CudaCopies | None = None
        if device.type == "cuda":
            self._device = _CudaCopies(device, self.layers, self.block_bytes, chunk_blocks)

    @property
    def on_gpu(self) -> bool:
        return self._device is not None

    @property
    def chunk_bytes(self) -> int:
        return self.chunk_blocks * self.block_bytes

    @property
    def shape(self) -> tuple[int, int, int]:
        """(blocks, layers, bytes of one layer's block); layers of different sizes count as one."""
        sizes = {layer.nbytes for layer in self.layers}
        if len(sizes) > 1:
            return self.chunk_blocks, 1, self.block_bytes
        return self.chunk_blocks, len(self.layers), sizes.pop()

    @property
    def layout(self) -> str:
        """Type of the elements, and a digest of all that two engines must have in common."""
        described = "\n".join(_describe(layer) for layer in self.layers)
        types = "+".join(sorted({layer.dtype for layer in self.layers}))
        return f"{types}/{blake3(described.encode()).hexdigest(length=16)}"

    def fence(self) -> object:
        """Marks what the engine has set off until now, on the calling thread's stream."""
        return self._device.fence() if self._device is not None else None

    def gather(self, blocks: Sequence[int], out: memoryview, fence: object = None) -> None:
        """Copy `blocks` to the start of `out` (format B, writable)."""
        self._check(blocks, 0, out)
        if self._device is not None:
            self._device.gather(blocks, out, fence)
            return
        for layer in self.layers:
            source, target = _array(layer), self._in_payload(layer, out, len(blocks))
            for start, stop, first in _runs(blocks):
                target[start:stop] = source[first : first + stop - start]

    def scatter(self, payload: memoryview, first: int, blocks: Sequence[int], fence: object = None) -> None:
        """Copy the blocks of `payload` from number `first` on to `blocks`."""
        self._check(blocks, first, payload)
        payload = payload[first * self.block_bytes :]
        if self._device is not None:
            self._device.scatter(payload, blocks, fence)
            return
        for layer in self.layers:
            source, target = self._in_payload(layer, payload, len(blocks)), _array(layer)
            for start, stop, block in _runs(blocks):
                target[block : block + stop - start] = source[start:stop]

    def _check(self, blocks: Sequence[int], first: int, payload: memoryview) -> None:
        if not all(0 <= block < self.num_blocks for block in blocks):
            raise IndexError(f"blocks {list(blocks)} of {self.num_blocks}")
        if (first + len(blocks)) * self.block_bytes > payload.nbytes:
            raise ValueError(
                f"{first} and {len(blocks)} blocks of {self.block_bytes} bytes in a payload of {payload.nbytes}"
            )

    def _in_payload(self, layer: Layer, payload: memoryview, blocks: int) -> np.ndarray[Any, Any]:
        """The layer's part of the first blocks, shaped as in the cache."""
        source = _array(layer)
        strides = [source.itemsize]
        for size in reversed(source.shape[2:]):
            strides.insert(0, strides[0] * size)
        return np.ndarray(
            (blocks, *source.shape[1:]),
            source.dtype,
            buffer=payload,
            offset=layer.offset,
            strides=(self.block_bytes, *strides),
        )


class _CudaCopies:
    """Through a buffer on the device, so that a chunk crosses the bus in one copy."""

    def __init__(
        self, device: torch.device, layers: Sequence[Layer], block_bytes: int, chunk_blocks: int
    ) -> None:
        self._device = device
        self._layers = layers
        self._stream = torch.cuda.Stream(device)
        self._buffer = torch.empty((chunk_blocks, block_bytes), dtype=torch.uint8, device=device)

    def fence(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def gather(self, blocks: Sequence[int], out: memoryview, fence: object) -> None:
        count = len(blocks)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._wait(fence)
            index = torch.tensor(blocks, device=self._device)
            for layer in self._layers:
                taken = layer.blocks.index_select(0, index).reshape(count, -1).view(torch.uint8)
                self._buffer[:count, layer.offset : layer.offset + layer.nbytes].copy_(taken)
            _host(out, count * self._buffer.shape[1]).copy_(self._buffer[:count].view(-1), non_blocking=True)
            self._stream.synchronize()

    def scatter(self, payload: memoryview, blocks: Sequence[int], fence: object) -> None:
        count = len(blocks)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._wait(fence)
            index = torch.tensor(blocks, device=self._device)
            self._buffer[:count].view(-1).copy_(
                _host(payload, count * self._buffer.shape[1]), non_blocking=True
            )
            for layer in self._layers:
                part = self._buffer[:count, layer.offset : layer.offset + layer.nbytes].clone()
                shaped = part.view(layer.blocks.dtype).view(count, *layer.blocks.shape[1:])
                layer.blocks.index_copy_(0, index, shaped)
            self._stream.synchronize()

    def _wait(self, fence: object) -> None:
        if fence is not None:
            self._stream.wait_event(fence)


def page_lock(buffer: memoryview) -> bool:
    """Page-lock shared memory for copies to and from CUDA devices, until `page_unlock`. Whether that was possible;
    copies work without, more slowly."""
    address = np.frombuffer(buffer, np.uint8).ctypes.data
    return int(torch.cuda.cudart().cudaHostRegister(address, buffer.nbytes, 0)) == 0


def page_unlock(buffer: memoryview) -> None:
    torch.cuda.cudart().cudaHostUnregister(np.frombuffer(buffer, np.uint8).ctypes.data)


def _layers(caches: Mapping[str, torch.Tensor], num_blocks: int) -> Iterator[Layer]:
    """One for each piece of memory: layers that share their KV count once."""
    seen: set[tuple[Any, ...]] = set()
    offset = 0
    for name, cache in caches.items():
        if not isinstance(cache, torch.Tensor):
            raise LayoutError(f"KV cache of {name} is a {type(cache).__name__}; needed: one tensor")
        place = (cache.data_ptr(), tuple(cache.shape), cache.stride(), cache.dtype)
        if place in seen:
            continue
        seen.add(place)
        integers = _SAME_SIZE.get(cache.element_size())
        if integers is None:
            raise LayoutError(f"KV cache of {name} has elements of {cache.element_size()} bytes")
        blocks = _blocks_first(name, cache.detach(), num_blocks).view(integers)
        nbytes = blocks[0].numel() * blocks.element_size()
        yield Layer(name, blocks, offset, nbytes, str(cache.dtype).removeprefix("torch."))
        offset += nbytes


def _blocks_first(name: str, cache: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Blocks come first or, where keys and values stand apart, second. A kernel may cut each into equal parts."""
    leading = cache.shape[:2]
    exact = [dim for dim, size in enumerate(leading) if size == num_blocks]
    if len(exact) == 1:
        return cache.movedim(exact[0], 0)
    if not exact:
        cut = [dim for dim, size in enumerate(leading) if size and size % num_blocks == 0]
        if len(cut) == 1:
            return cache.unflatten(cut[0], (num_blocks, -1)).movedim(cut[0], 0)
    raise LayoutError(
        f"KV cache of {name} has the shape {tuple(cache.shape)}: which of its first dimensions counts the engine's "
        f"{num_blocks} blocks can't be told"
    )


def _describe(layer: Layer) -> str:
    shape, strides = tuple(layer.blocks.shape[1:]), layer.blocks.stride()[1:]
    # The stride of a dimension of one says nothing.
    order = sorted((dim for dim, size in enumerate(shape) if size > 1), key=lambda dim: -strides[dim])
    return f"{layer.name} {layer.dtype} {shape} {order}"


def _array(layer: Layer) -> np.ndarray[Any, Any]:
    array: np.ndarray[Any, Any] = layer.blocks.numpy()
    return array


def _host(payload: memoryview, nbytes: int) -> torch.Tensor:
    return torch.frombuffer(payload, dtype=torch.uint8, count=nbytes)


def _runs(blocks: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Start and end in `blocks` of every run of neighbours, and its first block."""
    start = 0
    for index in range(1, len(blocks) + 1):
        if index == len(blocks) or blocks[index] != blocks[index - 1] + 1:
            yield start, index, blocks[start]
            start = index
