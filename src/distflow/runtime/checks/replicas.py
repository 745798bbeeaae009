"""Whether ranks that train the same model still have the same weights."""

import hashlib
import json
from collections.abc import Mapping

from distflow.runtime.checks import TrustError
from distflow.training.collective import Collective


def check_replicas(hashes: Mapping[str, str], step: int, ranks: Collective) -> None:
    """hashes: of the weights that this rank has published, by name. Raises TrustError naming tensors, on every rank."""
    if ranks.size == 1:
        return
    text = json.dumps(sorted(hashes.items()))
    digest = float(int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "little"))
    if ranks.max(digest) == -ranks.max(-digest):
        return
    everyone = ranks.gather(dict(hashes))
    odd = [name for name in hashes if len({own.get(name) for own in everyone}) > 1]
    raise TrustError(
        f"the ranks that train together no longer have the same weights after step {step}: {', '.join(odd[:5])}, "
        f"{len(odd)} tensors in all. A node or callback changed them on some rank, or a device computes wrongly"
    )
