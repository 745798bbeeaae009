"""A bounded cache of prefilled prompts."""

from collections.abc import Callable

from distflow.models.cached_decoder import PromptKV


class PromptCache:
    """Prefilled prompts by (weight version, tokens).

    When they would be more than `max_tokens`, all older ones are dropped. Requests come in order,
    so only the last prompts are likely to be wanted again.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._rows: dict[tuple[object, tuple[int, ...]], tuple[PromptKV, int]] = {}
        self._num_tokens = 0

    def clear(self) -> None:
        self._rows.clear()
        self._num_tokens = 0

    def rows(
        self,
        version: object,
        contexts: list[tuple[int, ...]],
        prefill: Callable[[list[tuple[int, ...]]], PromptKV],
    ) -> list[tuple[PromptKV, int]]:
        """The place of each context; missing ones are prefilled together and kept."""
        places = dict[tuple[int, ...], tuple[PromptKV, int]]()
        missing = list[tuple[int, ...]]()
        for context in contexts:
            if (version, context) in self._rows:
                places[context] = self._rows[version, context]
            else:
                missing.append(context)

        if missing:
            forward = prefill(missing)
            added = {context: (forward, row) for row, context in enumerate(missing)}
            places |= added
            self._keep(version, added, len(missing) * forward.keys.shape[-2])

        return [places[context] for context in contexts]

    def _keep(
        self,
        version: object,
        added: dict[tuple[int, ...], tuple[PromptKV, int]],
        num_tokens: int,
    ) -> None:
        if self._num_tokens + num_tokens > self.max_tokens:
            self.clear()
        if num_tokens > self.max_tokens:
            return

        self._num_tokens += num_tokens
        for context, place in added.items():
            self._rows[version, context] = place
