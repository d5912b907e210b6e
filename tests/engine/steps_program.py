"""Run the same requests through SGLang's original scheduler and through ours.

Prints, as JSON, every output and the final content of the prefix cache. Run it in the folder of
tests: ``python -m engine.steps_program MODEL normal|overlap``.
"""

from __future__ import annotations

import contextlib
import json
import random
import sys
import tempfile
from array import array
from concurrent.futures import Executor, Future
from typing import Any

import numpy as np
import torch
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.scheduler_components.batch_result_processor import (
    SchedulerBatchResultProcessor,
)
from sglang.srt.mem_cache.radix_cache import RadixCache

from sglrl.inference.sampling import from_kwargs
from sglrl.wire.codec import encode
from sglrl.wire.engine import GenerateArgs
from sglrl_workers.engine.sglang import compat, convert
from sglrl_workers.engine.sglang.accelerations import decode_results
from sglrl_workers.engine.sglang.commands import Resume
from sglrl_workers.engine.sglang.scheduler import SglrlScheduler, _Receiver

from .programs import make_scheduler

ARGUMENTS: dict[str, Any] = {
    "chunked_prefill_size": 48,
    "max_running_requests": 12,
    # In 0.5.17 the cache is so small that prefixes are evicted and running requests are retracted.
    # Later versions evict and retract differently in each run.
    "max_total_tokens": 900 if compat.VERSION == "0.5.17" else 20_000,
    "schedule_conservativeness": 0.1,
}
REQUESTS = 50


class _Done(Exception):
    pass


class AtOnce(Executor):
    """Compile a grammar synchronously instead of in a thread.

    Which request runs in which step must not depend on the timing of a thread.
    """

    def submit(self, function: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(function(*args, **kwargs))
        return future


class Ends:
    """Both ends of the scheduler: its input and its output.

    The input has a few requests of all kinds per step and aborts some of them. The output is
    recorded.
    """

    socket = None

    def __init__(self, scheduler: SglrlScheduler) -> None:
        self.chance = random.Random(5)
        self.samplings = convert.Samplings(scheduler.tokenizer, scheduler.model_config.vocab_size)
        self.left = [self.request(i) for i in range(REQUESTS)]
        self.open: set[str] = set()
        self.said: list[Any] = []
        self.quiet = 0

    def request(self, i: int) -> list[Any]:
        choose = self.chance.choice
        values: dict[str, Any] = {
            "max_new_tokens": choose([1, 2, 30, 64, 65, 66, 100, 130]),
            "temperature": choose([0.0, 1.0]),
            "ignore_eos": choose([True, False]),
        }
        match choose(["", "", "", "", "tokens", "stop", "regex", "min", "grammar", "penalty"]):
            case "tokens":
                values["stop_token_ids"] = sorted(self.chance.sample(range(3, 500), 20))
            case "stop":
                values["stop"] = ["a", "e"]
            case "regex":
                values["stop_regex"] = ["[x-z]"]
            case "min":
                least = min(20, values["max_new_tokens"])
                values |= {"min_new_tokens": least, "ignore_eos": False}
            case "grammar":
                values["regex"] = "[a-z ]{40}"
            case "penalty":
                values["frequency_penalty"] = 0.5
        top = choose([0, 0, 0, 2])
        # Shared prefixes: the whole prompt, much, one token or nothing. Long prompts have parts.
        shared = [[7, 8, 9, 10, 11, 12], [7, 8, 9, 40, 41], [300 + i % 5]][i % 3]
        ids = [*shared, *(100 + (i * j) % 7 for j in range(choose([0, 1, 8, 20, 70])))]
        args = GenerateArgs(
            np.array(ids, "<i4").tobytes(),
            encode(from_kwargs(values).to_wire(values["max_new_tokens"], None)),
            choose([True, True, False]),
            top,
            choose([False, False, False, True]),
            0,
            b"",
        )
        params, *_ = self.samplings.get(bytes(args.sampling), args.stream)
        request = convert.generate_request(i, args, params, None)
        request.extra_key = choose(["0", "1"])
        if "regex" not in values and choose([False, False, True]):
            # The request resumes after another worker has generated these tokens.
            begun = array("q", [140, 235, 60][: values["max_new_tokens"] - 1])
            return [Resume(request.rid, begun), request]
        return [request]

    def pull(self) -> list[Any]:
        if not self.left and not self.open:
            # The overlapping loops still have a step to process.
            self.quiet += 1
            if self.quiet > 4:
                raise _Done
            return []
        count = self.chance.choice([0, 0, 1, 3])
        pulled = [request for requests in self.left[:count] for request in requests]
        self.left = self.left[count:]
        self.open.update(request.rid for request in pulled)
        if self.open and self.chance.random() < 0.02:
            rid = self.chance.choice(sorted(self.open))
            return [*pulled, AbortReq(rid=rid)]
        return pulled

    def send_output(self, output: Any, about: Any = None) -> None:
        if isinstance(output, AbortReq):
            self.open.discard(output.rid)
            self.said.append(["aborted", output.rid])
            return
        for i, rid in enumerate(output.rids):
            reason = output.finished_reasons[i]
            if reason is not None:
                self.open.discard(rid)
            logprobs = [
                getattr(output, f"output_{name}")[i] if output.output_token_logprobs_val else None
                for name in (
                    "token_logprobs_val",
                    "token_logprobs_idx",
                    "top_logprobs_val",
                    "top_logprobs_idx",
                )
            ]
            self.said.append(
                [rid, list(output.output_ids[i]), reason, output.cached_tokens[i], logprobs]
            )


def tree(cache: Any) -> list[Any]:
    """Return the content of the prefix cache, without node ids and times."""

    def of(node: Any) -> list[Any]:
        children = sorted(node.children.items(), key=lambda item: str(item[0]))
        return [
            [str(key), list(child.key.token_ids), child.lock_ref, child.hit_count, of(child)]
            for key, child in children
        ]

    return [cache.evictable_size(), cache.protected_size(), of(cache.root_node)]


def run(scheduler: Any) -> dict[str, Any]:
    torch.manual_seed(3)
    ends = Ends(scheduler)
    retracted = scheduler.sglrl_preempted
    object.__setattr__(scheduler.output_streamer, "send_to_detokenizer", ends)
    scheduler.ipc_channels.send_to_tokenizer.handle = ends.send_output
    fields = compat.field_values(scheduler.request_receiver) | {"recv_from_tokenizer": ends}
    scheduler.request_receiver = _Receiver(**fields)
    with contextlib.suppress(_Done):
        scheduler.run_event_loop()
    found = {
        "said": ends.said,
        "retracted": scheduler.sglrl_preempted - retracted,
        "left": scheduler.token_to_kv_pool_allocator.available_size(),
    }
    if type(scheduler.tree_cache) is RadixCache:
        found["tree"] = tree(scheduler.tree_cache)
    assert scheduler.flush_cache()
    return found


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        scheduler: Any = make_scheduler(
            sys.argv[1],
            f"{folder}/rendezvous",
            disable_overlap_schedule=sys.argv[2] != "overlap",
            **ARGUMENTS,
        )
        scheduler.grammar_manager.grammar_backend.executor = AtOnce()
        ours = scheduler.batch_result_processor
        theirs = SchedulerBatchResultProcessor(**compat.field_values(ours))
        short = 0
        go_on = decode_results.Results._go_on

        def counted(self: Any, batch: Any, result: Any) -> Any:
            nonlocal short
            part, outcome = go_on(self, batch, result)
            short += len(batch.reqs) - len(part.reqs)
            return part, outcome

        decode_results.Results._go_on = counted  # type: ignore[method-assign]
        found: dict[str, Any] = {
            "results": type(ours).__name__,
            "cache": type(scheduler.tree_cache).__name__,
        }
        scheduler.batch_result_processor = theirs
        found["theirs"] = run(scheduler)
        scheduler.batch_result_processor = ours
        found["ours"] = run(scheduler)
        found["tokens"] = short
        print(json.dumps(found))


if __name__ == "__main__":
    main()
