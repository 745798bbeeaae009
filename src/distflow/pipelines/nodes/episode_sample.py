"""The sample of an episode: all of its conversations with tokens to train on, end to end."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from operator import attrgetter
from typing import Any

from distflow.data.sample import Sample, Segment
from distflow.environments.chat import Chat
from distflow.environments.tokens_between_turns import TurnTokens
from distflow.pipelines.nodes.episode_outcome import Outcome
from distflow.rewards.reward_results import Score
from distflow.runtime.rollout_loop.group import Group


@dataclass
class EpisodeSamples:
    """Makes the samples of a group's episodes."""

    group: Group
    tokens: TurnTokens
    agents: Mapping[str, Any]
    """The `AgentConfig` of each agent, by name; empty without agents."""

    def __post_init__(self) -> None:
        # each call of a reward function makes a sample too
        self._written = cache(self.tokens.written)

    def sample(self, index: int, chat: Chat, outcome: Outcome) -> Sample:
        """chat: the episode's first conversation."""
        talks = self.trained(chat)
        last_talk = (talks or chat.conversations)[-1]
        segments, forks = self._lay_out(chat)
        last_drawn = _last_drawn(talks)
        last_turn = -1

        turns = [each for each in segments if each.owner == "policy" and each.token_ids]
        for number, turn in enumerate(turns):
            if turn is last_drawn:
                last_turn = number

        text = ""
        if last_drawn is not None:
            text = self.tokens.decode(last_drawn.token_ids)
        elif last_talk.last is not None:
            text = last_talk.last.text

        return replace(
            self.group.sample(index, None, text, last_talk.finish_reason),
            last_turn=last_turn,
            segments=segments,
            forks=tuple(forks),
            conversation=tuple(self._messages(chat)),
            outcome=outcome,
            valid=outcome is not None and isinstance(outcome.reward_result, Score),
            rejected=outcome is None,
            head=chat.head,
        )

    def trained(self, chat: Chat) -> list[Chat]:
        """The episode's conversations that drew a token to train on; the one with the last reply is
        the last."""
        return [each for each in chat.conversations if each.num_drawn and self._is_trained(each)]

    def _is_trained(self, chat: Chat) -> bool:
        return not self.agents or bool(self.agents[chat.agent].trainable)

    def _lay_out(self, chat: Chat) -> tuple[list[Segment], list[tuple[str, int]]]:
        """The segments, those of the first conversation first, and the name and the start of each
        other conversation."""
        segments = list[Segment]()
        if self._is_trained(chat):
            segments += chat.segments
        if not segments:
            segments.append(Segment("prompt", tuple(self.group.row.prompt_ids)))

        forks = list[tuple[str, int]]()
        start = sum(len(segment.token_ids) for segment in segments[1:])
        for fork in sorted(self.trained(chat), key=self._place):
            if not fork.name:
                continue
            forks.append((fork.name, start))
            segments += fork.segments
            start += len(fork.token_ids)

        return segments, forks

    def _place(self, chat: Chat) -> tuple[int, list[int]]:
        """Sort key of conversations: by agent, then by the numbers of the forks."""
        agent = list(self.agents).index(chat.agent) if self.agents else 0
        forks = [int(number) for number in chat.name.split(".") if number.isdecimal()]
        return agent, forks

    def _messages(self, chat: Chat) -> list[dict[str, str]]:
        """For display: one conversation after another; several agents' in the order in which they
        speak."""
        messages = list[tuple[int, dict[str, str]]]()  # with the turn that each belongs to
        for talk in sorted(chat.conversations, key=self._place):
            if not talk.num_drawn and talk is not chat:
                continue

            names = dict[str, str]()
            if talk.agent:
                names["agent"] = talk.agent
            fork = talk.name.removeprefix(talk.agent).removeprefix(".")
            if fork:
                names["fork"] = fork

            said = list[tuple[int, dict[str, str]]]()
            turn = 0
            for segment in reversed(talk.segments):
                if segment.owner == "policy":
                    turn = segment.turn
                text = self._written(segment.token_ids)
                said.append((turn, {"owner": segment.owner, "text": text, **names}))

            messages += reversed(said)

        if self.agents:
            messages.sort(key=lambda each: each[0])
        return [message for _, message in messages]


def by_last_reply(talks: Sequence[Chat]) -> list[Chat]:
    """Sorted by their last tokens: a reply without room, which has none, may follow."""
    return sorted(talks, key=attrgetter("drawn_at"))


def _last_drawn(talks: Sequence[Chat]) -> Segment | None:
    """The last reply in time that has tokens."""
    for talk in reversed(by_last_reply(talks)):
        for segment in reversed(talk.segments):
            if segment.owner == "policy" and segment.token_ids:
                return segment
    return None
