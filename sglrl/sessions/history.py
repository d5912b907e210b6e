"""The tree of the turns that a session and its forks have sampled, with messages and rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from msgspec.structs import force_setattr

from ..core.turn_tree import ROOT, Leaf, TurnTree
from ..errors import UsageError
from ..inference.completion import Beginning, Completion, Conversation
from ..inference.message import AssistantMessage
from ..inference.prompts import Message
from ..inference.tokens import without_surrogates
from .arrays import joined_rows, routed_stop
from .observations import Dialogue, Observation, answer_of
from .rewards import Rewards
from .session_spec import SessionSpec
from .trajectory import Trajectory

_TOO_LATE: Final = (
    "messages were observed after text or token ids, and no turn was sampled in between: use "
    "unobserve, and observe the messages first"
)


class Position(NamedTuple):
    """A place in a history, at which a session goes on.

    Attributes:
        last: the turn after which the session goes on, or ``ROOT`` before the first turn.
        tokens: all tokens up to this place, int32 bytes.
        prompt_bytes: the size in bytes of the conversation's first prompt, at the start of
            ``tokens``. 0 before the first turn.
        dialogue: the conversation up to this place.
        begins: whether this place is at the beginning of a turn of the assistant, before its first
            sampled token. If False, it is after a sampled turn.
        conversation: the buffer that holds the prompts of the earlier turns.
    """

    last: int
    tokens: bytes
    prompt_bytes: int
    dialogue: Dialogue
    begins: bool
    conversation: Conversation

    def takes_messages(self, promptless: bool) -> bool:
        """Return whether messages may follow at this place.

        Args:
            promptless: whether the session has no prompt, so that observations begin it.
        """
        return self.dialogue.messages is not None or (promptless and not self.tokens)

    def check_messages_first(self, waiting: Sequence[Observation]) -> None:
        """Raise ``UsageError`` if messages cannot join the prompt of the turn that begins here.

        Args:
            waiting: the observations that were already made at this place.
        """
        if waiting:
            raise UsageError(_TOO_LATE)
        if self.dialogue.begun:
            raise UsageError(
                "the prompt ends within the assistant's turn (continue_final_message), so no "
                "message can follow it: observe text or token ids"
            )


def beginning(dialogue: Dialogue) -> Position:
    """Return the place before the first turn of a conversation."""
    return Position(ROOT, b"", 0, dialogue, True, Conversation())


class History:
    """The turns of a session and its forks.

    Attributes:
        turns: the completions, in the order in which they ended.
        rewards: the rewards of each turn.
    """

    def __init__(self, reward_weights: Mapping[str, float]) -> None:
        self.turns: list[Completion] = []
        self.rewards = Rewards(reward_weights)
        self._tree = TurnTree()
        self._specs: list[SessionSpec] = []
        """For each turn, the spec of its session."""
        self._dialogues: list[Dialogue] = []
        """For each turn, the conversation before its answer."""
        self._said: list[AssistantMessage | None] = []
        """For each turn, the message that the renderer has parsed, or None without a renderer."""

    def after(self, turn: int) -> Position:
        """Return the place after a turn."""
        start = 4 * self._tree.starts(turn)[0]
        dialogue, held = self._dialogues[turn], self._conversation(turn)
        return Position(turn, self._tree.tokens(turn), start, dialogue, False, held)

    def before(self, turn: int) -> Position:
        """Return the place before a turn, after its prompt."""
        starts = self._tree.starts(turn)
        tokens = self._tree.tokens(turn)[: 4 * starts[-1]]
        dialogue, held = self._dialogues[turn], self._conversation(turn)
        return Position(self._tree.parent(turn), tokens, 4 * starts[0], dialogue, True, held)

    async def opened(
        self,
        spec: SessionSpec,
        place: Position,
        given: list[Message] | None,
        observed: Sequence[Observation],
    ) -> tuple[Position, list[Observation]]:
        """Return the place after the prompt of a turn, and the observations that follow the prompt.

        Messages that were observed before the first turn, or after ``go_back``, belong to the
        prompt, because agents often reset their environment after the session was opened. They
        extend the conversation of ``place``. If the extended conversation begins with the messages
        of an earlier turn, the exact tokens of that turn are kept, as by ``Session.rewrite``.

        Args:
            place: a place at the beginning of a turn.
            given: the messages of the conversation, or None for the prompt of ``spec``.
            observed: the observations that were made at this place.

        Raises:
            InvalidRequest: there is no prompt, or the chat template rejects it.
            UsageError: messages were observed after text or token ids.
        """
        rest = list(observed)
        messages: list[Message] = []
        while rest and isinstance(first := rest[0], list):
            messages += first
            del rest[0]
        if any(isinstance(item, list) for item in rest):
            raise UsageError(_TOO_LATE)
        dialogue = place.dialogue
        if messages:
            whole = [*(dialogue.messages or ()), *messages]
            turn = self.find(whole)
            if turn != ROOT:
                return self.after(turn), [whole[self.message_count(turn) :], *rest]
            given, dialogue = whole, Dialogue(whole)
        elif place.tokens:
            return place, rest
        if spec.promptless and given is None and rest:
            text = rest.pop(0)
            assert not isinstance(text, list)
            tokens = await spec.encode_text(text) if isinstance(text, str) else text
        else:
            tokens = await spec.ids(given)
        dialogue = dialogue._replace(answer_at=len(tokens))
        return beginning(dialogue)._replace(tokens=tokens), rest

    def path(self, turn: int) -> tuple[int, ...]:
        """Return the turns of the conversation that ends with a turn."""
        return self._tree.path(turn)

    def keep(
        self,
        place: Position,
        spec: SessionSpec,
        prompt: bytes,
        completion: Completion,
        dialogue: Dialogue,
        said: AssistantMessage | None,
    ) -> Position:
        """Add a turn. Return the place after it.

        Args:
            place: the place of the session before the turn.
            spec: the spec of the session.
            prompt: all tokens before the sampled ones.
            dialogue: the conversation before the answer.
            said: the turn that the renderer has parsed, or None without a renderer.
        """
        held = place.conversation
        if not prompt.startswith(held.tokens):
            held = Conversation()
        held.tokens = prompt
        force_setattr(completion, "prompt", Beginning(held, len(prompt)))
        sampled = b"".join([chunk.ids for chunk in completion.chunks])
        grows = place.last != ROOT and prompt.startswith(place.tokens)
        turn = self._tree.add(prompt, sampled, place.last if grows else None)
        parent, start = self._tree.parent(turn), place.prompt_bytes
        if parent == ROOT:
            start = len(prompt)
        elif parent != place.last:
            start = 4 * self._tree.starts(turn)[0]
        self._specs.append(spec)
        self._dialogues.append(dialogue)
        self._said.append(said)
        self.turns.append(completion)
        self.rewards.add_turn()
        return Position(turn, prompt + sampled, start, dialogue, False, held)

    def find(self, messages: Sequence[Message]) -> int:
        """Return the turn whose conversation is the longest prefix of messages. ``ROOT``: none.

        White space around the content of an assistant's message makes no difference.
        """
        given = _stripped(messages)
        best, length = ROOT, 0
        for turn, dialogue in enumerate(self._dialogues):
            before = dialogue.messages
            if before is None or len(before) < length or len(before) >= len(given):
                continue
            if _stripped(before) != given[: len(before)]:
                # Decoding the answer takes longer than this comparison.
                continue
            known = _stripped(self.messages(turn) or [])
            if length < len(known) and known == given[: len(known)]:
                best, length = turn, len(known)
        return best

    def message_count(self, turn: int) -> int:
        """Return the number of messages of the conversation up to the end of a turn."""
        return len(self._dialogues[turn].messages or ()) + 1

    def messages(self, turn: int) -> list[dict[str, Any]] | None:
        """Return the messages up to the end of a turn, or None if its prompt is not messages."""
        dialogue = self._dialogues[turn]
        if dialogue.messages is None:
            return None
        tokens, ended = self._tree.tokens(turn), self.end_token(turn) is not None
        answer = answer_of(self._specs[turn], tokens, dialogue, ended, self._said[turn])
        return [*map(dict, dialogue.messages), answer]

    def rewarded_turn(self, last: int, call: str = "") -> int:
        """Return the turn to which a reward belongs.

        It is the turn that has the call ``call``, or the turn ``last`` if ``call`` is "".

        Raises:
            UsageError: no turn was sampled, or none has this call.
        """
        turn = last
        if call:
            turn = next((t for t in reversed(range(len(self.turns))) if self._calls(t, call)), ROOT)
            if turn == ROOT:
                raise UsageError(f"no turn of this session has a call with the id {call!r:.200}")
        elif turn == ROOT:
            raise UsageError("no turn was sampled yet that could be rewarded")
        return turn

    def routed(self, place: Position) -> int:
        """Return the first position without routed experts in the turns before a place."""
        if place.last == ROOT:
            return 0
        return routed_stop([self.turns[turn] for turn in self.path(place.last)])

    def said(self, place: Position) -> AssistantMessage | None:
        """Return the parsed turn that ends at a place, or None without a turn or a renderer."""
        return None if place.begins else self._said[place.last]

    def end_token(self, turn: int) -> int | None:
        """Return the end token at the end of a turn, if the model sampled one."""
        if turn == ROOT:
            return None
        completion = self.turns[turn]
        ids = completion.output_ids
        # With ignore_eos or a stop string, stop_match is not the end token of the turn, so also
        # compare with the model's end tokens.
        ends = {completion.stop_match, *self._specs[turn].requests.info.eos_token_ids}
        return int(ids[-1]) if len(ids) and int(ids[-1]) in ends else None

    def trajectory(
        self, *, total: float, generating: float, metadata: dict[str, Any]
    ) -> Trajectory:
        """Return the trajectory of all turns. The history must have at least one turn."""
        *branches, last = (
            self._trajectory_of(leaf, total=total, generating=generating, metadata=metadata)
            for leaf in self._tree.leaves()
        )
        return last.with_branches(branches).with_decode(self._specs[0].requests.decode)

    def _trajectory_of(self, leaf: Leaf, **values: Any) -> Trajectory:
        last = leaf.path[-1]
        tokens = self._tree.tokens(last)
        starts = dict(zip(leaf.path, self._tree.starts(last), strict=True))
        prompt = starts[leaf.path[0]]
        return Trajectory.from_turns(
            tokens[: 4 * prompt],
            tokens[4 * prompt :],
            [starts[turn] - prompt for turn in leaf.own],
            [self.turns[turn] for turn in leaf.own],
            [(self.rewards.totals[turn], self.rewards.named[turn]) for turn in leaf.own],
            routed=joined_rows([self.turns[turn] for turn in leaf.path]),
            messages=self.messages(last),
            **values,
        )

    def _calls(self, turn: int, call: str) -> bool:
        said = self._said[turn]
        return said is not None and call in [made.id for made in said.tool_calls]

    def _conversation(self, turn: int) -> Conversation:
        prompt = self.turns[turn].prompt
        return prompt.conversation if isinstance(prompt, Beginning) else Conversation()


def _stripped(messages: Sequence[Message]) -> list[Message]:
    """Return messages without white space around the content of the assistant's messages.

    Lone surrogates in these messages are replaced by U+FFFD, as in the messages of the history.
    """
    return [
        without_surrogates({**message, "content": (message.get("content") or "").strip()})
        if message.get("role") == "assistant"
        else message
        for message in messages
    ]
