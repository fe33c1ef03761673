"""A deployment in memory, as far as HotLoader sees it, on a clock of its own. For what no real server does on demand.

Each hot-load takes ``polls`` looks to end as ``outcome``. ``fail[method]`` lists what the next calls of it raise; None
lets one call pass.
"""

from collections import defaultdict

import attrs

from cwtrain.errors import AlreadyExistsError, HotLoadInProgressError, NotFoundError
from cwtrain.models.service import (
    Deployment,
    HotLoad,
    HotLoadReplica,
    HotLoadSpec,
    HotLoadState,
    HotLoadStatus,
    HotLoadTarget,
    PromptCachePolicy,
    ReplicaState,
    ResourceStatus,
)


class Clock:
    def __init__(self):
        self.now = 0.0
        self.slept = []

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds


class FakeService:
    def __init__(self, *, replicas=("r1", "r2"), polls=2):
        self.deployment = Deployment(
            id="dep",
            name="toy",
            status=ResourceStatus.READY,
            hot_load=HotLoadTarget(bucket="weights", path_prefix="run"),
        )
        self.hot_loads = []  # newest first
        self.replicas = dict.fromkeys(replicas, "initial")
        self.replica_errors = {}
        self.stuck = set()
        self.polls = polls
        self.outcome = HotLoadState.COMPLETED
        self.conditions = ()
        self.calls = []
        self.fail = defaultdict(list)
        self._left = {}

    def _enter(self, method, *args):
        self.calls.append((method, *args))
        if self.fail[method]:
            error = self.fail[method].pop(0)
            if error is not None:
                raise error

    def within(self, seconds, *, retries=True):
        return self

    def count(self, method):
        return sum(call[0] == method for call in self.calls)

    def get_deployment(self, deployment_id):
        self._enter("get_deployment", deployment_id)
        return self.deployment

    def list_hot_loads(self, deployment_id=None, *, page_size=0):
        self._enter("list_hot_loads", deployment_id)
        return iter(list(self.hot_loads))

    def create_hot_load(
        self,
        deployment_id,
        identity,
        *,
        snapshot_type,
        incremental=None,
        prompt_cache_policy=PromptCachePolicy.UNSPECIFIED,
        hot_load_id=None,
    ):
        for known in self.hot_loads:
            if known.id == hot_load_id:
                self.calls.append(("create_hot_load", hot_load_id))
                if known.identity != identity:
                    raise AlreadyExistsError("taken")
                return known
        active = next((one for one in self.hot_loads if not one.state.terminal), None)
        if active is None:
            policy = prompt_cache_policy
            if policy is PromptCachePolicy.UNSPECIFIED:
                policy = PromptCachePolicy.PRESERVE
            made = HotLoad(
                spec=HotLoadSpec(
                    id=hot_load_id,
                    deployment_id=deployment_id,
                    identity=identity,
                    type=snapshot_type,
                    incremental_snapshot_metadata=incremental,
                    prompt_cache_policy=policy,
                ),
                status=HotLoadStatus(state=HotLoadState.PENDING),
            )
        # A failure that is planned comes after the service has acted: the answer is lost, the work is not.
        if active is None:
            self.add(made)
        self._enter("create_hot_load", hot_load_id)
        if active is not None:
            raise HotLoadInProgressError("a hot-load is already in progress", hot_load_id=active.id)
        return made

    def add(self, hot_load, polls=None):
        self.hot_loads.insert(0, hot_load)
        self._left[hot_load.id] = self.polls if polls is None else polls
        return hot_load

    def get_hot_load(self, hot_load_id):
        self._enter("get_hot_load", hot_load_id)
        at = next((at for at, one in enumerate(self.hot_loads) if one.id == hot_load_id), None)
        if at is None:
            raise NotFoundError(f"no hot-load {hot_load_id}")
        hot_load = self.hot_loads[at]
        if not hot_load.state.terminal:
            self._left[hot_load_id] -= 1
            state = HotLoadState.IN_PROGRESS
            if self._left[hot_load_id] <= 0:
                state = self.outcome
            status = HotLoadStatus(state=state, conditions=self.conditions if state is HotLoadState.FAILED else ())
            hot_load = self.hot_loads[at] = attrs.evolve(hot_load, status=status)
            if state is HotLoadState.COMPLETED:
                for name in set(self.replicas) - self.stuck:
                    self.replicas[name] = hot_load.identity
        return hot_load

    def list_hot_load_replicas(self, hot_load_id):
        self._enter("list_hot_load_replicas", hot_load_id)
        return [
            HotLoadReplica(
                name=name,
                state=ReplicaState.ERROR if name in self.replica_errors else ReplicaState.READY,
                current_snapshot_identity=identity,
                error_reason=self.replica_errors.get(name, ""),
            )
            for name, identity in sorted(self.replicas.items())
        ]
