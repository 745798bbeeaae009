"""A bounded cache of prefilled prompts."""

from collections import OrderedDict
from collections.abc import Callable

from distflow.models.cached_decoder import PromptKV


class PromptCache:
    """Prefilled prompts by (weight version, tokens); when it is full, the oldest forwards are
    dropped.

    The unit is a whole forward, because its prompts share storage: dropping a single one would free
    nothing.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._rows: dict[tuple[object, tuple[int, ...]], tuple[PromptKV, int]] = {}
        self._forwards: OrderedDict[int, tuple[int, list[tuple[object, tuple[int, ...]]]]] = (
            OrderedDict()
        )
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._rows)

    def clear(self) -> None:
        self._rows.clear()
        self._forwards.clear()
        self._num_tokens = 0

    def rows(
        self,
        version: object,
        contexts: list[tuple[int, ...]],
        prefill: Callable[[list[tuple[int, ...]]], PromptKV],
    ) -> list[tuple[PromptKV, int]]:
        """The place of each context; missing ones are prefilled together and kept."""
        found = {context: self._rows.get((version, context)) for context in contexts}
        if missing := [context for context in contexts if found[context] is None]:
            forward = prefill(missing)
            found |= {context: (forward, row) for row, context in enumerate(missing)}
            self._keep(version, missing, forward)
        return [place for context in contexts if (place := found[context])]

    def _keep(self, version: object, contexts: list[tuple[int, ...]], forward: PromptKV) -> None:
        num_tokens = len(contexts) * forward.keys.shape[-2]
        if num_tokens > self.max_tokens:
            return
        names: list[tuple[object, tuple[int, ...]]] = [(version, context) for context in contexts]
        self._rows.update({name: (forward, row) for row, name in enumerate(names)})
        self._forwards[id(forward)] = (num_tokens, names)
        self._num_tokens += num_tokens
        while self._num_tokens > self.max_tokens:
            _, (freed_tokens, old_names) = self._forwards.popitem(last=False)
            self._num_tokens -= freed_tokens
            for name in old_names:
                del self._rows[name]
