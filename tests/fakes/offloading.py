"""KV offloading on a CPU: what vLLM's own worker does with CUDA streams, with copies between tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult


class HostMemory(OffloadingWorker):
    """Blocks in the memory beside the KV cache; every transfer is complete when it was submitted."""

    def __init__(self, spec: Any, caches: Any) -> None:
        self._blocks_per_chunk = spec.blocks_per_chunk
        self._caches = [each.tensor for each in caches.tensors]
        num_blocks = spec.num_chunks * spec.blocks_per_chunk
        self._stored = [torch.zeros((num_blocks, *cache.shape[1:]), dtype=cache.dtype) for cache in self._caches]
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for block, place in self._pairs(src_spec, dst_spec):
            for cache, stored in zip(self._caches, self._stored, strict=True):
                stored[place] = cache[block]
        return self._finish(job_id)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for block, place in self._pairs(dst_spec, src_spec):
            for cache, stored in zip(self._caches, self._stored, strict=True):
                cache[block] = stored[place]
        return self._finish(job_id)

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        pass

    def _finish(self, job_id: int) -> bool:
        self._finished.append(TransferResult(job_id, success=True))
        return True

    def _pairs(self, blocks: Any, chunks: Any) -> Iterator[tuple[int, int]]:
        """Each block of the cache with its place; the first may be within a chunk."""
        (first,) = blocks.block_indices
        begin = first - first % self._blocks_per_chunk
        for index, block in enumerate(blocks.block_ids, start=first):
            chunk = chunks.block_ids[(index - begin) // self._blocks_per_chunk]
            yield int(block), int(chunk) * self._blocks_per_chunk + index % self._blocks_per_chunk
