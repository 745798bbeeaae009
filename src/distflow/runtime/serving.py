"""What the engines of a run serve of a worker's weights."""

from distflow.flow.ticket import Version
from distflow.runtime.checks.canary import make_canary
from distflow.runtime.checks.replicas import check_replicas
from distflow.runtime.checks.sent import check_served
from distflow.runtime.ports import Ports
from distflow.runtime.publish import Publisher
from distflow.runtime.recorder import Recorder
from distflow.runtime.residence import Residence
from distflow.runtime.resources import Resources
from distflow.runtime.session import Session
from distflow.runtime.spec import Spec
from distflow.runtime.updates import Updates


class Serving:
    """Sends the weights of a worker when they are due. It sends none where it trains none, or no worker generates."""

    def __init__(
        self,
        spec: Spec,
        resources: Resources,
        ports: Ports,
        session: Session,
        recorder: Recorder,
        updates: Updates,
        residence: Residence,
        version: Version,
    ) -> None:
        """version: of the weights that the resources hold."""
        self._ports, self._recorder, self._updates, self._version = ports, recorder, updates, version
        self._residence = residence
        self._engine = resources.rollout
        self._publisher: Publisher | None = None
        if resources.actor is not None and spec.plan.generates:
            canary = make_canary(spec, resources) if self._engine is not None else None
            sends, dtype = spec.sends_weights, spec.weight_dtype
            self._publisher = Publisher(
                resources.actor, ports.weights, dtype, sends=sends, canary=canary, session=session
            )
        self.step = version.step  # whose weights the engines were given last

    def begin(self) -> dict[str, float]:
        """The weights that this process begins with; the canary's metrics."""
        if self._publisher is None:
            return {}
        compared = self._publisher.publish(self._version, at_start=True)
        self._recorder.serves(self._version)
        return compared

    def send(self, version: Version) -> tuple[bool, dict[str, float]]:
        """The weights of a step's end to the engines. Whether they had changed, and the canary's metrics."""
        self.step, updated = version.step, self._updates.since_sent()
        if self._publisher is None:
            return updated, {}
        self._residence.only(("actor",))
        outcome = self._publisher.publish_changed(version, updated)
        check_served(self._served(), version)
        check_replicas(self._publisher.hashes, version.step, self._ports.collective)
        self._recorder.serves(version)
        return outcome

    def send_to_newcomers(self, step: int) -> None:
        """Between two steps, `step` being the next. The weights are those that were sent last, or newer ones, which
        then go to all."""
        if self._publisher is None:
            return
        self._residence.only(("actor",))
        sent = self.step < step and self.send(Version(self._version.incarnation, step))[0]
        if not sent:
            self._publisher.push_again()

    def _served(self) -> Version | None:
        """What the engines serve to which this rank publishes, the oldest of them; None where it has none."""
        own = [self._engine.version] if self._engine is not None else []
        confirmed = self._ports.weights.confirmed
        return min([*own, *([confirmed] if confirmed is not None else [])], default=None)
