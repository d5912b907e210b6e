"""Sessions and runs of a blocking client."""

from __future__ import annotations

from pathlib import Path

import pytest

import sglrl

from .agents import (
    ITEMS,
    two_turns,
)


def test_blocking(tmp_path: Path) -> None:
    with sglrl.blocking("fake", engine="fake", vocab_size=1000) as client:
        with client.session(input_ids=[4, 5], max_new_tokens=3) as session:
            assert session.generate().output_ids.tolist() == [4, 5, 4]
            session.observe([9])
            session.reward(0.5)
            session.generate()
            assert session.trajectory(1.0).rewards.tolist() == [0.5, 1.0]
            assert session.ids.tolist() == [4, 5, 4, 5, 4, 9, 4, 5, 4]
        with pytest.raises(sglrl.Closed):
            session.generate()
        run = client.rollout(two_turns, ITEMS, group_size=2)
        assert sorted(g.index for g in run) == list(range(40))
        assert run.metrics.samples_done == 80
        with client.rollout(two_turns, ITEMS, batch_size=5) as run:
            run.take(5)
            run.pause(timeout=300)
            state = run.state_dict()
            run.save(tmp_path / "run.json")
            run.resume()
            assert [len(batch) for batch in run.batches()] == [5] * 7
        rest = client.rollout(two_turns, ITEMS, state=tmp_path / "run.json")
        assert len(list(rest)) == len(ITEMS) - 5
        assert state["next"] >= 5


def test_a_blocking_run_is_looped_over_once() -> None:
    with sglrl.blocking("fake", engine="fake", vocab_size=1000) as client:
        left = client.rollout(two_turns, ITEMS)
        for _ in left:
            break
        whole = client.rollout(two_turns, ITEMS)
        assert len(list(whole)) == len(ITEMS)
        for run in (left, whole):
            with pytest.raises(sglrl.UsageError, match="has ended"):
                list(run)


def test_the_blocking_forms_have_what_the_others_have() -> None:
    for blocking, other in (
        (sglrl.BlockingSession, sglrl.Session),
        (sglrl.BlockingRollout, sglrl.Rollout),
    ):
        public = {name for name in vars(other) if not name.startswith("_")}
        internal = {"oldest_version", "oldest_versions", "concurrency", "refused", "rewarded"}
        # Those of rollouts, whose agents are coroutine functions.
        internal |= {"base_url", "api_key"}
        assert public - internal <= set(dir(blocking))


def test_an_evaluation() -> None:
    items = [{"input_ids": [5 + i], "number": i} for i in range(5)]
    with sglrl.blocking("tiny", engine="fake") as client:
        result = client.evaluate(items, lambda item, text: item["number"] > 2, max_new_tokens=3)
    assert result.mean_score == 0.4
    assert repr(result) == "<Evaluation of 5 items, 5 samples, mean score 0.4, pass@1 40.0%>"
