"""The turns that a session has sampled: a tree, with completions, messages and rewards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import force_setattr

from ..core.turn_tree import ROOT, Leaf, TurnTree
from ..errors import UsageError
from ..inference.completion import Beginning, Completion, Conversation
from ..inference.message import AssistantMessage
from ..inference.prompts import Message
from .observations import Dialogue, answer_of
from .rewards import Rewards, RewardValue
from .session_spec import SessionSpec
from .trajectory import Trajectory


class History:
    """The turns of one session, and the place in their tree at which the session goes on.

    Args:
        dialogue: the conversation before the first turn.

    Attributes:
        turns: the completions, in the order in which they were sampled.
        rewards: the rewards of each turn.
        last: the turn after which the session goes on; ``ROOT``: none.
        tokens: all tokens up to the end of that turn, int32 bytes.
        prompt_bytes: how many bytes of ``tokens`` come before the first turn of its conversation.
        dialogue: the conversation up to that turn.
        begins: the assistant's turn has begun, and nothing of it is sampled.
    """

    def __init__(self, spec: SessionSpec, dialogue: Dialogue) -> None:
        self._spec = spec
        self.turns: list[Completion] = []
        self.rewards = Rewards(spec.reward_weights)
        self._tree = TurnTree()
        self._dialogues: list[Dialogue] = []
        """For each turn, the conversation that it ends."""
        self._said: list[AssistantMessage | None] = []
        """For each turn, what the renderer has parsed, if there is one."""
        self._conversation = Conversation()
        self.begin(dialogue)

    def begin(self, dialogue: Dialogue) -> None:
        """Go on with a new conversation."""
        self.last = ROOT
        self.tokens = b""
        self.prompt_bytes = 0
        self.dialogue = dialogue
        self.begins = True

    def go_to(self, turn: int) -> None:
        """Go on after a turn."""
        self.last = turn
        self.tokens = self._tree.tokens(turn)
        self.prompt_bytes = 4 * self._tree.starts(turn)[0]
        self.dialogue = self._dialogues[turn]
        self.begins = False

    def go_before(self, turn: int) -> None:
        """Go on before a turn, with its prompt."""
        starts = self._tree.starts(turn)
        self.last = self._tree.parent(turn)
        self.tokens = self._tree.tokens(turn)[: 4 * starts[-1]]
        self.prompt_bytes = 4 * starts[0]
        self.dialogue = self._dialogues[turn]
        self.begins = True

    def path(self) -> tuple[int, ...]:
        """Return the turns of the current conversation."""
        return self._tree.path(self.last)

    def keep(
        self,
        prompt: bytes,
        completion: Completion,
        dialogue: Dialogue,
        said: AssistantMessage | None,
    ) -> None:
        """Add a turn, and go on after it.

        Args:
            prompt: all tokens before the sampled ones.
            dialogue: the conversation that it ends.
            said: the parsed turn, if there is a renderer.
        """
        if not prompt.startswith(self._conversation.tokens):
            self._conversation = Conversation()
        self._conversation.tokens = prompt
        force_setattr(completion, "_prompt", Beginning(self._conversation, len(prompt)))
        sampled = b"".join([chunk.ids for chunk in completion._chunks])
        grows = self.last != ROOT and prompt.startswith(self.tokens)
        turn = self._tree.add(prompt, sampled, self.last if grows else None)
        if self._tree.parent(turn) == ROOT:
            self.prompt_bytes = len(prompt)
        elif self._tree.parent(turn) != self.last:
            self.prompt_bytes = 4 * self._tree.starts(turn)[0]
        self.last = turn
        self.tokens = prompt + sampled
        self.dialogue = dialogue
        self.begins = False
        self._dialogues.append(dialogue)
        self._said.append(said)
        self.turns.append(completion)
        self.rewards.add_turn()

    def find(self, messages: Sequence[Message]) -> int:
        """Return the turn whose conversation is the longest beginning of messages, or ``ROOT``."""
        given = list(messages)
        best, length = ROOT, 0
        for turn, dialogue in enumerate(self._dialogues):
            before = dialogue.messages
            if before is None or len(before) < length or before != given[: len(before)]:
                # Decoding the answer takes longer than this comparison.
                continue
            known = self.messages(turn) or []
            if length < len(known) and known == given[: len(known)]:
                best, length = turn, len(known)
        return best

    def messages(self, turn: int) -> list[dict[str, Any]] | None:
        """Return the conversation up to the end of a turn, or None without messages."""
        dialogue = self._dialogues[turn]
        if dialogue.messages is None:
            return None
        tokens, ended = self._tree.tokens(turn), self.end_token(turn) is not None
        answer = answer_of(self._spec, tokens, dialogue, ended, self._said[turn])
        return [*map(dict, dialogue.messages), answer]

    def reward(self, value: RewardValue, name: str, call: str, whole: bool) -> None:
        """Add a reward to the turn of a call, or else to the last turn. See ``Session.reward``."""
        if call:
            for turn in reversed(range(len(self.turns))):
                said = self._said[turn]
                if said is not None and call in [made.id for made in said.tool_calls]:
                    break
            else:
                raise UsageError(f"no turn of this session has a call with the id {call!r:.200}")
        elif self.last == ROOT:
            raise UsageError("no turn was sampled yet that could be rewarded")
        else:
            turn = self.last
        self.rewards.add(turn, value, name, call, whole)

    def said(self) -> AssistantMessage | None:
        """Return the parsed turn after which the session goes on, if there is a renderer."""
        return None if self.begins else self._said[self.last]

    def end_token(self, turn: int) -> int | None:
        """Return the end token at the end of a turn, if the model sampled one."""
        if turn == ROOT:
            return None
        completion = self.turns[turn]
        ids = completion.output_ids
        # Also test the model's end tokens: with ignore_eos or a stop string, stop_match is not one.
        ends = {completion.stop_match, *self._spec.requests.info.eos_token_ids}
        return int(ids[-1]) if len(ids) and int(ids[-1]) in ends else None

    def trajectory(
        self, *, total: float, generating: float, metadata: dict[str, Any]
    ) -> Trajectory:
        """Return the trajectory of all turns. There is at least one."""
        *branches, last = (
            self._trajectory_of(leaf, total=total, generating=generating, metadata=metadata)
            for leaf in self._tree.leaves()
        )
        return last.with_branches(branches).with_decode(self._spec.requests.decode)

    def _trajectory_of(self, leaf: Leaf, **values: Any) -> Trajectory:
        last = leaf.path[-1]
        tokens = self.tokens if last == self.last else self._tree.tokens(last)
        starts = dict(zip(leaf.path, self._tree.starts(last), strict=True))
        prompt = starts[leaf.path[0]]
        return Trajectory.from_turns(
            tokens[: 4 * prompt],
            tokens[4 * prompt :],
            [starts[turn] - prompt for turn in leaf.own],
            [self.turns[turn] for turn in leaf.own],
            [(self.rewards.totals[turn], self.rewards.named[turn]) for turn in leaf.own],
            messages=self.messages(last),
            **values,
        )
