"""A store that is away in a step of a publish: the publish waits for it, and nothing that arrived is sent again."""

from __future__ import annotations

from scenarios import case
from scenarios.parts import Outage, Stopwatch, emulated_scene


@case("store-503-claim", shows="503 at the claim is waited out by publish_directory", seconds=(5, 20, 45))
def claim(seconds):
    with emulated_scene() as scene:
        publisher = scene.publisher(deadline=seconds + 60.0)
        publisher.baseline()
        outage = Outage(scene, seconds, status=503, method="PUT", path="_claims/run-v000001")
        watch = Stopwatch()
        outcome = publisher.publish_directory(scene.trainer.step())
        outage.end()
        scene.check_served(scene.trainer.tensors)
        assert outage.struck, "the outage met no request"
        assert outcome.state.value == "COMPLETED"
        return {"took": watch.seconds, "struck": outage.struck, "identity": outcome.identity}
