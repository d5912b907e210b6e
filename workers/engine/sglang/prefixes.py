"""SGLang's prefix cache, told of a request's tokens without looking for their place.

``RadixCache`` walks from its root for each request that was prefilled, and again when it ends, to
find where its tokens belong, copies their slots twice, looks up what it has just inserted, and
writes it back: half a dozen operations on a GPU for one request, while the GPU waits for the next
step. But a request holds the node of what it shares with others, and unless somebody else went on
there with the same token, all the rest is new: one new leaf. Everything else is left to SGLang's
own code, and so is an SGLang that reads otherwise than what this was written against.
"""

from __future__ import annotations

import time
from array import array
from typing import Any, Final

import torch
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey, TreeNode

from . import compat

_METHODS: Final = (
    "cache_finished_req",
    "cache_unfinished_req",
    "insert",
    "_insert_helper",
    "_inc_hit_count",
    "_update_leaf_status",
    "inc_lock_ref",
    "dec_lock_ref",
)
_KNOWN: Final = frozenset({"ed09be0f340485a7663f9a290283dfb0dae796815b8809d70e6a33a18f945a48"})
"""Digests of their texts: of 0.5.17. Later versions have other trees."""


def install(scheduler: Any) -> None:
    """Make the scheduler's prefix cache a ``Prefixes``, if it is one that this knows."""
    tree = scheduler.tree_cache
    if (
        type(tree) is RadixCache
        and tree.page_size == 1
        and not (tree.disable or tree.is_eagle or tree.enable_kv_cache_events)
        and compat.digest((RadixCache, _METHODS)) in _KNOWN
    ):
        tree.__class__ = Prefixes


class Prefixes(RadixCache):  # type: ignore[misc]
    """``RadixCache`` with a short way for a request whose tokens are new behind its node. After it
    the tree is the same, but for the numbers that nodes have."""

    def cache_unfinished_req(self, req: Any, chunked: bool = False) -> None:
        ids, begin = req.get_fill_ids(), req.cache_protected_len
        if not self._new_behind(req, ids, begin):
            super().cache_unfinished_req(req, chunked)
            return
        leaf = self._add(req, ids, begin, chunked)
        # The request's lock moves from its node to the leaf, and all behind it stays locked.
        leaf.lock_ref = 1
        self.protected_size_ += len(leaf.value)
        req.last_node = leaf
        req.cache_protected_len = len(ids)
        req.prefix_indices = torch.cat([req.prefix_indices, leaf.value]) if begin else leaf.value

    def cache_finished_req(
        self, req: Any, is_insert: bool = True, *, kv_len_to_handle: int
    ) -> None:
        ids, begin = req.origin_input_ids + req.output_ids, req.cache_protected_len
        del ids[kv_len_to_handle:]
        inserts = is_insert and not self.disable_finished_insert
        if not (inserts and self._new_behind(req, ids, begin)):
            super().cache_finished_req(req, is_insert, kv_len_to_handle=kv_len_to_handle)
            return
        leaf = self._add(req, ids, begin, chunked=False)
        self.evictable_size_ += len(leaf.value)
        self.evictable_leaves.add(leaf)
        self.dec_lock_ref(req.last_node)

    def _new_behind(self, req: Any, ids: array[int], begin: int) -> bool:
        """There are tokens behind those that the request's node stands for, and nobody has put them
        there."""
        node = req.last_node
        if node is None or begin >= len(ids):
            return False
        return _child_key(req, ids[begin]) not in node.children

    def _add(self, req: Any, ids: array[int], begin: int, chunked: bool) -> TreeNode:
        """A leaf behind the request's node, with the tokens from ``begin`` on."""
        priority = req.priority or 0
        parent = req.last_node
        leaf = TreeNode(priority=priority)
        leaf.parent = parent
        leaf.key = RadixKey(ids[begin:], req.extra_key)
        row = self.req_to_token_pool.req_to_token[req.req_pool_idx, begin : len(ids)]
        leaf.value = row.to(dtype=torch.int64, copy=True)
        self._inc_hit_count(leaf, chunked)
        parent.children[_child_key(req, ids[begin])] = leaf
        # All that it goes on from was used.
        now, node = time.monotonic(), parent
        while node is not self.root_node:
            node.last_access_time = now
            node.priority = max(node.priority, priority)
            self._inc_hit_count(node, chunked)
            node = node.parent
        node.last_access_time = now
        node.priority = max(node.priority, priority)
        return leaf


def _child_key(req: Any, token: int) -> Any:
    """As ``RadixKey.child_key``, for pages of one token."""
    return token if req.extra_key is None else (req.extra_key, token)
