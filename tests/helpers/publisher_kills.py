"""A publisher that is killed (SIGKILL) at random instants of a run and started again: what must hold meanwhile.

Each seed is a run of its own on a real emulator: deltas, full snapshots, an empty version, WAIT 0 and 1, chains that
are cut. A life is a forked child with a toy trainer and a publisher; the next one begins on the same disk or on an
empty one. The children write down what each version holds before they publish it: so what is served can be compared.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import signal
import sys
import time
import traceback
from collections import Counter

import attrs
import numpy as np

from cwtrain.config import HotLoadConfig
from cwtrain.errors import HotLoadError, HotLoadFailedError
from cwtrain.hotload import Publisher
from cwtrain.hotload._publish.names import parse_identity
from cwtrain.models.service import HotLoadState
from cwtrain.plugins import Plugins, hookimpl
from helpers.toy_trainer import ToyTrainer, hashes

RUN = "run"
BASE = "run-v000000"
ENDED_SECONDS = 60.0


class Log:
    """Lines of JSON that survive a kill, and a plugin that writes down which identity a version gets."""

    def __init__(self, path, life):
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._life = life

    def say(self, what, **values):
        os.write(self._fd, json.dumps({"what": what, "life": self._life, **values}).encode() + b"\n")

    @hookimpl
    def cwtrain_weight_sync(self, event):
        if type(event).__name__ == "SyncStarted":
            self.say("began", identity=event.identity, number=event.version)


@attrs.define
class PublisherKills:
    """One seed's run. ``scene`` is a ``Scene`` (a deployment of its own); its directory is the caller's to remove."""

    scene: object
    seed: int
    versions: int
    lives: int
    """At most so many lives are killed; the next one may go on to the end."""
    longest: float = 1.5
    """Seconds of the longest life that is killed."""
    ends: Counter = attrs.field(factory=Counter)
    claims_after: dict = attrs.field(factory=dict)
    tensors: str | None = None
    """Where the base lies of a publisher that is fed with tensors; None for one of directories."""
    damage: bool = False
    """Whether now and then an engine refuses what it loads, full snapshots too."""

    def run(self):
        """Live, be killed, live again, and come to an end. Raises AssertionError naming the seed."""
        rng = random.Random(self.seed)
        values = {
            "wait": rng.random() < 0.5,
            "full_every": rng.choice([2, 3, 5, 20]),
            "mirror": None,
        }
        if rng.random() < 0.15:
            values |= {"full_every": 0, "mirror": False}
        continues = rng.random() < 0.3
        if rng.random() < 0.25:
            self.tensors = rng.choice(["memory", "disk", "none"])
            values |= {"full_every": max(2, values["full_every"]), "mirror": None}
            self.ends[f"fed with tensors, base {self.tensors}"] += 1
        self.damage = rng.random() < 0.4 and values["full_every"] > 0
        if self.damage:
            self._damage()
        kinds = self._kinds(rng, values)
        left, life = len(kinds), 0
        while True:
            last = life >= self.lives or not left
            delay = None if last else rng.random() ** 2 * self.longest
            done = kinds[len(kinds) - left :] or ["delta"]
            killed = self._live(life, done, values, continues=continues, delay=delay)
            self._check(life)
            self.ends["killed" if killed else "ended by itself"] += 1
            left = max(0, left - self._published_in(life))
            if not killed:
                break
            life += 1
            if not continues and rng.random() < 0.4:
                shutil.rmtree(self._state_dir, ignore_errors=True)
                self.ends["empty disk"] += 1
        self.ends["runs"] += 1
        self.ends["versions published"] += sum(one["what"] == "published" for one in self._lines())

    def _damage(self):
        self.scene.emulator.control.add_fault(
            "replica",
            "damage",
            identity=r"run(\.\d+)?-v0000(0[1-9]|[1-9]\d).*",
            probability=0.12,
            seed=self.seed,
            times=8,
        )

    def _kinds(self, rng, values):
        kinds = ["delta"] * self.versions
        kinds[rng.randrange(1, self.versions)] = "empty"
        for _ in range(rng.randint(0, 2)):
            kinds[rng.randrange(1, self.versions)] = "full"
        if values["mirror"] is False:
            kinds = ["delta" if kind == "full" else kind for kind in kinds]
        return kinds

    # -- one life ------------------------------------------------------------------------------------------------------

    @property
    def _state_dir(self):
        return self.scene.trainer.root / "state"

    @property
    def _log_path(self):
        return self.scene.trainer.root / "lives.jsonl"

    def _live(self, life, kinds, values, *, continues, delay):
        """Run a life in a child, and kill it after ``delay`` seconds. Return whether the kill met it alive."""
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if not child:
            code = 0
            try:
                self._life(life, kinds, values, continues=continues)
            except BaseException:
                traceback.print_exc()
                code = 1
            sys.stderr.flush()
            os._exit(code)
        if delay is not None:
            time.sleep(delay)  # the instant is what is random here
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, f"seed {self.seed}: life {life} failed by itself"
        return os.WIFSIGNALED(status)

    def _life(self, life, kinds, values, *, continues):
        log = Log(self._log_path, life)
        root = self.scene.trainer.root
        kept = root / "trainer.pickle"
        if continues and kept.exists():
            trainer = pickle.loads(kept.read_bytes())
        else:
            trainer = ToyTrainer(root)
            trainer.rng = random.Random(f"{self.seed}-{life}")
        client, s3 = self.scene.clients()
        plugins = Plugins()
        plugins.register(log, name="log")
        settings = HotLoadConfig(
            **{
                "deployment_id": self.scene.deployment_id,
                "run_id": RUN,
                "timeout": 60.0,
                "state_dir": str(self._state_dir),
                **values,
            }
        )
        publisher = Publisher(
            settings,
            disk_dir=trainer.updates,
            base=trainer.base,
            client=client,
            s3=s3,
            plugins=plugins,
            tensor_base=self.tensors,
            poll_interval=0.02,
        )
        log.say("written", number=0, base=None, hashes=hashes(trainer.at(0)))
        if self.tensors is None and (not continues or publisher.state.acknowledged is None):
            publisher.publish_directory(trainer.updates)
        if trainer.number:
            # A trainer that goes on calls its hook again for the version that it does not know to be published.
            self._until_taken(publisher, trainer)
        for kind in kinds:
            base = trainer.number
            trainer.step(kind)
            if kind == "full" or self.tensors is not None:
                base = None
            log.say("written", number=trainer.number, base=base, hashes=hashes(trainer.tensors))
            if continues:
                (root / "trainer.new").write_bytes(pickle.dumps(trainer))
                (root / "trainer.new").rename(kept)
            outcome = self._until_taken(publisher, trainer)
            log.say("published", number=trainer.number, identity=outcome.identity, state=outcome.state.value)
        self._finish(publisher, trainer)
        log.say("ended", number=trainer.number, identity=publisher.state.acknowledged.identity)

    def _publish(self, publisher, trainer):
        if self.tensors is None:
            return publisher.publish_directory(trainer.updates / f"weight_v{trainer.number:06d}")
        held = [(name, np.frombuffer(raw, np.uint8)) for name, (_, _, raw) in trainer.tensors.items()]
        return publisher.publish_tensors(lambda: held, number=trainer.number)

    def _until_taken(self, publisher, trainer):
        """Publish, again where the engine refused a full snapshot too: as a restart would."""
        for _ in range(20):
            try:
                return self._publish(publisher, trainer)
            except HotLoadFailedError:
                assert self.damage
        raise AssertionError("the faults do not end")

    def _finish(self, publisher, trainer):
        """Come to the end; a last version that did not arrive is given again."""
        for _ in range(20):
            try:
                return publisher.finish()
            except HotLoadError:
                assert self.damage
                self._until_taken(publisher, trainer)
        raise AssertionError("the faults do not end")

    # -- what must hold ------------------------------------------------------------------------------------------------

    def _lines(self):
        if not self._log_path.exists():
            return []
        return [json.loads(line) for line in self._log_path.read_text().splitlines()]

    def _published_in(self, life):
        return sum(1 for one in self._lines() if one["what"] == "published" and one["life"] == life)

    def _check(self, life):
        where = f"seed {self.seed} after life {life}"
        self.claims_after[life] = set(self.scene.objects("_claims/"))
        lines = self._lines()
        written = {(one["life"], one["number"]): one for one in lines if one["what"] == "written"}
        hot_loads = self._ended_hot_loads(where)
        held = self._held_by_identity(where, lines, written)
        completed = {one.identity for one in hot_loads if one.state is HotLoadState.COMPLETED}
        assert self.damage or all(one.state is HotLoadState.COMPLETED for one in hot_loads), f"{where}: {hot_loads}"
        self._check_served(where, held, hot_loads)
        self._check_chains(where, held, lines, written, hot_loads, completed)
        self._check_journal(where, held, completed, lines)
        self._check_objects(where, completed)
        for one in lines:
            if one["what"] == "published" and one["state"] == "COMPLETED":
                assert one["identity"] in completed, f"{where}: {one} counts, and was never completed"

    def _ended_hot_loads(self, where):
        deadline = time.monotonic() + ENDED_SECONDS
        while True:
            found = list(self.scene.client.list_hot_loads(self.scene.deployment_id))
            if all(one.state.terminal for one in found):
                return found
            assert time.monotonic() < deadline, f"{where}: {found[0]} does not end"
            time.sleep(0.01)

    def _held_by_identity(self, where, lines, written):
        """Return what each identity must hold. None has ever two contents."""
        held = {}
        for one in lines:
            if one["what"] != "began":
                continue
            identity, content = one["identity"], written[self._life_of(one, written), one["number"]]["hashes"]
            if held.get(identity, content) != content:
                # Begun, and killed before the claim: what was streamed is gone, and nobody has seen the name.
                begun = self.tensors is not None and one["life"] > 0
                unused = f"_claims/{identity}.json" not in self.claims_after[one["life"] - 1]
                assert begun and unused, f"{where}: {identity} was used twice"
            held[identity] = content
        return held

    def _life_of(self, line, written):
        life = line["life"]
        while (life, line["number"]) not in written:
            life -= 1  # a trainer that goes on publishes once more what an earlier life wrote
        return life

    def _check_served(self, where, held, hot_loads):
        assert self.scene.served_bytes_are(held, hot_loads), f"{where}: other bytes are served than were written"

    def _check_chains(self, where, held, lines, written, hot_loads, completed):
        began = {one["identity"]: one for one in lines if one["what"] == "began"}
        for hot_load in hot_loads:
            previous = hot_load.previous_identity
            if previous is None:
                continue
            assert previous in completed, f"{where}: {hot_load.identity} applies to what was never completed"
            one = began[hot_load.identity]
            life = self._life_of(one, written)
            base = written[life, one["number"]]["base"]
            if base is None:
                continue  # tensors: the publisher chose the base, and what is served shows that it was right
            applied_to = written[self._life_of({"life": life, "number": base}, written), base]["hashes"]
            assert held[previous] == applied_to, f"{where}: {hot_load.identity} does not apply to {previous}"

    def _check_journal(self, where, held, completed, lines):
        try:
            journal = json.loads((self._state_dir / "journal.json").read_text())
        except FileNotFoundError:
            return
        known = journal["acknowledged"]
        if known is not None:
            assert known["identity"] in completed, f"{where}: {known} is acknowledged, and was never completed"
        pending = journal["pending"]
        if pending is not None and known is not None:
            assert known["identity"] != pending["identity"] or pending["identity"] in completed, where

    def _check_objects(self, where, completed):
        """No object is ever written twice, the base's least of all; what is COMPLETED is whole."""
        seen = self.scene.objects("")
        before = self.scene.seen_objects
        for key, modified in before.items():
            if not key.endswith(".status"):
                assert seen.get(key) == modified, f"{where}: {key} was written again or is gone"
        self.scene.seen_objects = seen
        for identity in completed:
            assert f"{identity}/model.safetensors.index.json" in seen, where
        bases = {key.split("/")[0] for key in seen if "-v000000" in key and not key.startswith("_")}
        assert bases <= {BASE}, f"{where}: the base was uploaded again as {bases}"
        for key in seen:
            name = key.split("/")[0]
            assert name.startswith("_") or parse_identity(RUN, name), f"{where}: {key}"
