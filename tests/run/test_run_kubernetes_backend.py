"""The Kubernetes back end, with the official client, against a server that plays the API (`kubernetes_cluster`)."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("kubernetes")

from kubernetes import client
from kubernetes_cluster import STARTED, Cluster

from phalanx.core.errors import UserError
from phalanx.run.backends.backend import Listener, Movable
from phalanx.run.backends.kubernetes.cluster_api import ClusterApi, ClusterError
from phalanx.run.backends.kubernetes.kubernetes_backend import KubernetesBackend
from phalanx.run.backends.kubernetes.kubernetes_options import KubernetesOptions

GUARD_S = 60.0
BASE = "phalanx-train"
STARTED_S = 1_795_291_200.0  # that is STARTED
PODS, JOBS = r"/pods$", r"/jobs$"

Story = Callable[[], Awaitable[None]]


class Told:
    """What the back end says, to be waited for."""

    def __init__(self) -> None:
        self.gone: dict[str, str] = {}
        self.short: list[float] = []
        self.changed = asyncio.Event()
        self.listener = Listener(self._gone, self._short)

    def _gone(self, host: str, why: str) -> None:
        assert host not in self.gone, f"{host} is told twice"
        self.gone[host] = why
        self.changed.set()

    def _short(self, left_s: float) -> None:
        self.short.append(left_s)
        self.changed.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self.changed.clear()
            await asyncio.wait_for(self.changed.wait(), GUARD_S)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    yield made
    made.close()


def api_of(cluster: Cluster) -> ClusterApi:
    configuration = client.Configuration(host=cluster.url)
    configuration.retries = False
    return ClusterApi(client.ApiClient(configuration), "ml")


def backend_of(cluster: Cluster, **given: Any) -> KubernetesBackend:
    options = KubernetesOptions(image="registry/train:1", tls_secret="tls", namespace="ml", grace_s=7, **given)
    settings = {"job": "train", "folder": "/var/lib/phalanx", "logs": "/var/lib/phalanx/logs"}
    clock = STARTED_S + 1000
    times = {"unconfirmed_s": 0.2, "first_wait_s": 0.05}
    return KubernetesBackend(api_of(cluster), BASE, options, settings, **times, clock=lambda: clock)


def own_job(cluster: Cluster, **spec: Any) -> None:
    """The driver's Job, as it is when the driver runs."""
    pod = {"spec": {"containers": [{"name": "driver", "image": "i"}], "restartPolicy": "Never"}}
    metadata = {"name": BASE, "namespace": "ml", "uid": "uid-of-driver", "annotations": {}}
    body = {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": {"template": pod, **spec}}
    cluster.put({**body, "status": {"startTime": STARTED, "active": 1}}, "ADDED")


async def until(holds: Callable[[], bool]) -> None:
    """Wait for what the server is told."""
    async with asyncio.timeout(GUARD_S):
        while not holds():
            await asyncio.sleep(0.01)


def run(story: Story) -> None:
    asyncio.run(asyncio.wait_for(story(), 3 * GUARD_S))


def hosts(wave: int, count: int) -> list[str]:
    return [f"{BASE}-w{wave}-{index}" for index in range(count)]


def test_hosts_are_one_indexed_job_and_those_on_their_way_count(cluster: Cluster) -> None:
    own_job(cluster)

    async def story() -> None:
        told, backend = Told(), backend_of(cluster, resources={"nvidia.com/gpu": 8})
        await backend.begin(told.listener)
        await backend.ask(3)
        assert backend.hosts == hosts(1, 3)
        await backend.ask(3)  # the same, which have not come yet
        backend.arrived(hosts(1, 3)[0])
        await backend.ask(3)  # one more than those
        assert backend.hosts == [*hosts(1, 3), *hosts(2, 1)]
        job = cluster.get("Job", f"{BASE}-w1")
        assert job["metadata"]["ownerReferences"][0]["uid"] == "uid-of-driver"
        assert (job["spec"]["completions"], job["spec"]["backoffLimitPerIndex"]) == (3, 0)
        container = job["spec"]["template"]["spec"]["containers"][0]
        assert container["resources"]["limits"] == {"nvidia.com/gpu": "8"}
        given = json.loads(container["command"][-1])
        assert given["driver"] == f"{BASE}.ml.svc:7700" and given["settings"]["job"] == "train"
        await backend.leave()
        assert told.gone == {}

    run(story)


def test_a_pod_that_ends_is_a_host_that_is_gone_with_its_last_words(cluster: Cluster) -> None:
    async def story() -> None:
        told, backend = Told(), backend_of(cluster)
        await backend.begin(told.listener)
        await backend.ask(3)
        first, second, third = hosts(1, 3)
        await until(lambda: len(cluster.pods()) == 3)
        cluster.place(first, "node-a")
        cluster.end_pod(first, code=2, message="starting\nerror: no token\n")
        cluster.end_pod(second, code=137, reason="Evicted", message="")
        await told.until(lambda: len(told.gone) == 2)
        assert "on node-a" in told.gone[first] and "exit status 2" in told.gone[first]
        assert told.gone[first].endswith("error: no token") and "Evicted" in told.gone[second]
        cluster.remove(first)  # is not told again
        cluster.remove(third)
        await told.until(lambda: third in told.gone)
        assert backend.hosts == []
        await backend.ask(1)
        assert backend.hosts == hosts(2, 1)
        await backend.leave()

    run(story)


def test_an_evicted_host_is_deleted_its_node_cordoned_and_never_used_again(cluster: Cluster) -> None:
    own_job(cluster)
    cluster.put({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node-b"}, "spec": {}}, "ADDED")

    async def story() -> None:
        told, backend = Told(), backend_of(cluster, cordon=True)
        await backend.begin(told.listener)
        await backend.ask(2)
        bad, good = hosts(1, 2)
        await until(lambda: len(cluster.pods()) == 2)
        cluster.place(bad, "node-b")
        await until(lambda: backend._hosts[bad].node == "node-b")
        await backend.evict(bad, "ECC errors")
        await told.until(lambda: bad in told.gone)
        assert told.gone == {bad: "it was ended (ECC errors)"}
        assert cluster.get("Node", "node-b")["spec"]["unschedulable"] is True
        written = cluster.get("Job", BASE)["metadata"]["annotations"]["phalanx-train/evicted-nodes"]
        assert json.loads(written) == ["node-b"]
        cluster.place(good, "node-b")  # it was pending, and its Job knew nothing of this yet
        await told.until(lambda: good in told.gone)
        assert "does not use any more" in told.gone[good]
        await backend.leave()

        later = backend_of(cluster)  # the next driver reads what the first one wrote
        await later.begin(Told().listener)
        await later.ask(1)
        spec = cluster.get("Job", f"{BASE}-w2")["spec"]["template"]["spec"]
        terms = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
        assert terms == [{"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": ["node-b"]}]}]
        await later.leave()

    run(story)


def test_where_cordoning_is_forbidden_the_job_keeps_off_the_node_all_the_same(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    own_job(cluster)
    cluster.refuse("PATCH", "/nodes/", 403, "Forbidden", 'nodes "a" is forbidden: User "system:sa" cannot patch', 9)

    async def story() -> None:
        told, backend = Told(), backend_of(cluster, cordon=True)
        await backend.begin(told.listener)
        await backend.ask(2)
        await until(lambda: len(cluster.pods()) == 2)
        for host, node in zip(hosts(1, 2), ("a", "b"), strict=True):
            cluster.place(host, node)
        await until(lambda: backend._hosts[hosts(1, 2)[1]].node == "b")
        for host in hosts(1, 2):
            await backend.evict(host, "bad")
        await told.until(lambda: len(told.gone) == 2)
        asked = [path for method, path in cluster.seen if "/nodes/" in path]
        assert asked == ["/api/v1/nodes/a"]  # once is enough
        await backend.leave()

    with caplog.at_level(logging.WARNING):
        run(story)
    assert "keeps off it all the same" in caplog.text


def test_a_released_host_may_come_again_on_its_node(cluster: Cluster) -> None:
    async def story() -> None:
        told, backend = Told(), backend_of(cluster)
        await backend.begin(told.listener)
        await backend.ask(1)
        (host,) = hosts(1, 1)
        await until(lambda: bool(cluster.pods()))
        cluster.place(host, "node-c")
        await until(lambda: backend._hosts[host].node == "node-c")
        await backend.release(host, "not needed")
        await told.until(lambda: host in told.gone)
        await backend.release(host, "not needed")  # it is gone: nothing more
        await backend.ask(1)
        spec = cluster.get("Job", f"{BASE}-w2")["spec"]["template"]["spec"]
        assert "nodeAffinity" not in spec["affinity"]
        await backend.leave()

    run(story)


def test_a_host_that_is_released_before_it_has_a_pod_gets_none_that_stays(cluster: Cluster) -> None:
    cluster.makes_pods = False

    async def story() -> None:
        told, backend = Told(), backend_of(cluster)
        await backend.begin(told.listener)
        await backend.ask(1)
        await backend.release(hosts(1, 1)[0], "not needed")
        assert told.gone == {}
        cluster.make_pods(cluster.get("Job", f"{BASE}-w1"))
        await told.until(lambda: hosts(1, 1)[0] in told.gone)
        await backend.leave()

    run(story)


def test_a_drained_node_and_one_that_confirms_nothing(cluster: Cluster) -> None:
    cluster.kubelets_work = False
    why = {"reason": "DeletionByTaintManager", "message": "Taint manager: deleting due to NoExecute taint"}

    async def story() -> None:
        told, backend = Told(), backend_of(cluster)
        await backend.begin(told.listener)
        await backend.ask(2)
        drained, lost = hosts(1, 2)
        await until(lambda: len(cluster.pods()) == 2)
        cluster.begin_to_delete(drained, 600, {"reason": "EvictionByEvictionAPI", "message": "Eviction API: evicting"})
        cluster.place(lost, "node-d")
        cluster.begin_to_delete(lost, 0, why)
        await told.until(lambda: lost in told.gone)
        assert "node node-d has not confirmed" in told.gone[lost] and "DeletionByTaintManager" in told.gone[lost]
        assert drained not in told.gone  # it has its time, and ends by itself
        cluster.end_pod(drained, code=143)
        await told.until(lambda: drained in told.gone)
        await backend.leave()

    run(story)


def test_a_driver_that_is_started_again_takes_over(cluster: Cluster) -> None:
    own_job(cluster)

    async def story() -> None:
        first = backend_of(cluster)
        await first.begin(Told().listener)
        await first.ask(3)
        await until(lambda: len(cluster.pods()) == 3)
        await first.leave()
        cluster.end_pod(hosts(1, 3)[1])  # while there is no driver
        told, second = Told(), backend_of(cluster)
        await second.begin(told.listener)
        await told.until(lambda: hosts(1, 3)[1] in told.gone)
        assert second.hosts == [hosts(1, 3)[0], hosts(1, 3)[2]]
        await second.ask(2)
        assert len(second.hosts) == 2
        await second.ask(3)
        assert second.hosts[-1] == hosts(2, 1)[0]
        await second.leave()

    run(story)


def test_what_happened_while_the_watch_was_cut_is_not_missed(cluster: Cluster) -> None:
    """The connection breaks, and the server has forgotten what happened since: everything is listed again."""

    async def story() -> None:
        told, backend = Told(), backend_of(cluster)
        await backend.begin(told.listener)
        await backend.ask(3)
        await until(lambda: len(cluster.pods()) == 3 and cluster.watches == 1)
        await until(lambda: all(known.pod for known in backend._hosts.values()))
        with cluster.changed:
            cluster.remove(hosts(1, 3)[0])
            cluster.end_pod(hosts(1, 3)[1])
            cluster.forget()
        await told.until(lambda: len(told.gone) == 2)
        assert "was removed" in told.gone[hosts(1, 3)[0]] or "has ended" in told.gone[hosts(1, 3)[0]]
        await until(lambda: cluster.watches == 2)
        cluster.cut_watches()
        await until(lambda: cluster.watches == 3)
        cluster.end_pod(hosts(1, 3)[2])
        await told.until(lambda: len(told.gone) == 3)
        await backend.leave()

    run(story)


@pytest.mark.parametrize(
    ("code", "reason", "message"),
    [
        (401, "Unauthorized", "Unauthorized"),
        (403, "Forbidden", "pods is forbidden"),
        (429, "TooManyRequests", "too many requests"),
        (500, "InternalError", "etcdserver: request timed out"),
        (503, "ServiceUnavailable", "apiserver not ready"),
    ],
)
def test_lists_that_are_refused_are_asked_for_again(
    cluster: Cluster, caplog: pytest.LogCaptureFixture, code: int, reason: str, message: str
) -> None:
    cluster.refuse("GET", PODS, code, reason, message, times=2, **({"Retry_After": "0"} if code == 429 else {}))

    async def story() -> None:
        told, backend = Told(), backend_of(cluster)
        await backend.begin(told.listener)
        await backend.ask(1)
        await until(lambda: bool(cluster.pods()))
        cluster.end_pod(hosts(1, 1)[0])
        await told.until(lambda: bool(told.gone))
        await backend.leave()

    with caplog.at_level(logging.WARNING):
        run(story)
    assert caplog.text.count(f"{code}: {message}") == 1  # twice refused, told once


def test_orders_that_are_refused_fail_and_can_be_given_again(cluster: Cluster) -> None:
    quota = 'jobs.batch "phalanx-train-w1" is forbidden: exceeded quota'
    cluster.refuse("POST", JOBS, 403, "Forbidden", quota)
    cluster.refuse("DELETE", "/pods/", 500, "InternalError", "etcdserver: leader changed")

    async def story() -> None:
        told, backend = Told(), backend_of(cluster)
        await backend.begin(told.listener)
        with pytest.raises(ClusterError, match="exceeded quota"):
            await backend.ask(1)
        await backend.ask(1)
        assert backend.hosts == hosts(1, 1)
        await until(lambda: bool(backend._hosts[hosts(1, 1)[0]].pod))
        with pytest.raises(ClusterError, match="leader changed"):
            await backend.evict(hosts(1, 1)[0], "bad")
        await backend.evict(hosts(1, 1)[0], "bad")
        await told.until(lambda: bool(told.gone))
        await backend.leave()

    run(story)


def test_a_job_whose_making_was_not_answered_is_not_made_twice(cluster: Cluster) -> None:
    async def story() -> None:
        told, backend = Told(), backend_of(cluster)
        await backend.begin(told.listener)
        await backend.ask(1)
        await backend.leave()
        blind = backend_of(cluster)  # one that has not heard of the Job
        blind._is_listed.set()
        await blind.ask(4)
        assert blind.hosts == hosts(1, 1)  # as it was made the first time
        await blind.ask(4)
        assert blind.hosts == [*hosts(1, 1), *hosts(2, 3)]

    run(story)


def test_a_cluster_that_is_too_old_is_told(cluster: Cluster) -> None:
    cluster.knows_indexes = False

    async def story() -> None:
        backend = backend_of(cluster)
        await backend.begin(Told().listener)
        with pytest.raises(ClusterError, match=r"1\.29 or later"):
            await backend.ask(1)
        assert not [key for key in cluster.objects if key[0] == "Job"]
        await backend.leave()

    run(story)


def test_a_driver_without_rights_ends_with_the_cure(cluster: Cluster) -> None:
    cluster.refuse("GET", "/jobs/", 403, "Forbidden", "jobs.batch is forbidden: User cannot get resource")

    async def story() -> None:
        with pytest.raises(UserError, match=r"docs/run_kubernetes\.md"):
            await backend_of(cluster).begin(Told().listener)

    run(story)


def test_a_driver_that_begins_while_the_api_is_down_goes_on(cluster: Cluster) -> None:
    cluster.refuse("GET", "/jobs/", 503, "ServiceUnavailable", "apiserver not ready")
    own_job(cluster)

    async def story() -> None:
        backend = backend_of(cluster)
        await backend.begin(Told().listener)
        await backend.ask(1)
        assert cluster.get("Job", f"{BASE}-w1")["metadata"]["ownerReferences"][0]["uid"] == "uid-of-driver"
        await backend.leave()

    run(story)


def test_the_end_of_the_time_is_told_before(cluster: Cluster) -> None:
    own_job(cluster, activeDeadlineSeconds=1250)  # of which 1000 are over

    async def story() -> None:
        told, backend = Told(), backend_of(cluster, deadline_s=1250, stop_before_s=300)
        await backend.begin(told.listener)
        await told.until(lambda: bool(told.short))
        assert told.short == [250.0]
        await backend.ask(1)
        assert cluster.get("Job", f"{BASE}-w1")["spec"]["activeDeadlineSeconds"] == 250
        await backend.leave()

    run(story)


def test_whether_the_job_goes_on_when_the_drivers_pod_is_ended(cluster: Cluster) -> None:
    async def story() -> None:
        backend = backend_of(cluster)
        assert isinstance(backend, Movable)
        assert not await backend.goes_on()  # its Job was removed
        own_job(cluster)
        assert await backend.goes_on()  # its node is drained
        over = cluster.get("Job", BASE)
        over["status"]["conditions"] = [{"type": "FailureTarget", "status": "True", "reason": "DeadlineExceeded"}]
        cluster.put(over, "MODIFIED")
        assert not await backend.goes_on()
        cluster.refuse("GET", "/jobs/", 500, "InternalError", "no")
        assert await backend.goes_on()  # not known

    run(story)


def test_at_the_end_all_jobs_are_removed_and_no_host_is_left(cluster: Cluster) -> None:
    cluster.refuse("DELETE", "/jobs/", 500, "InternalError", "etcdserver: request timed out")

    async def story() -> None:
        told, backend = Told(), backend_of(cluster)
        await backend.begin(told.listener)
        await backend.ask(2)
        backend.arrived(hosts(1, 2)[0])
        await backend.ask(2)
        await backend.end()
        assert backend.hosts == [] and cluster.pods() == {}
        assert set(told.gone) == {*hosts(1, 2), *hosts(2, 1)}
        assert not [key for key in cluster.objects if key[0] == "Job"]

    run(story)


def test_the_end_does_not_wait_for_a_node_that_confirms_nothing(cluster: Cluster) -> None:
    cluster.kubelets_work = False

    async def story() -> None:
        told, backend = Told(), backend_of(cluster)
        await backend.begin(told.listener)
        await backend.ask(1)
        await until(lambda: bool(backend._hosts[hosts(1, 1)[0]].pod))
        await backend.end()
        assert "it was ended" in told.gone[hosts(1, 1)[0]]

    run(story)


def test_what_keeps_a_pod_waiting_is_told(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    text = "0/4 nodes are available: 4 Insufficient nvidia.com/gpu."
    reason = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": text}

    async def story() -> None:
        backend = backend_of(cluster)
        await backend.begin(Told().listener)
        await backend.ask(1)
        await until(lambda: bool(cluster.pods()))
        for _ in range(2):
            pod = cluster.pods()[hosts(1, 1)[0]]
            pod["status"] = {"phase": "Pending", "conditions": [reason]}
            cluster.put(pod, "MODIFIED")
        await until(lambda: "Insufficient" in caplog.text)
        cluster.place(hosts(1, 1)[0], "node-e")
        await until(lambda: backend._hosts[hosts(1, 1)[0]].node == "node-e")
        await backend.leave()

    with caplog.at_level(logging.WARNING):
        run(story)
    assert caplog.text.count("Insufficient") == 1


def test_foreign_pods_and_hosts_that_come_back_are_no_hosts(cluster: Cluster) -> None:
    async def story() -> None:
        told, backend = Told(), backend_of(cluster)
        await backend.begin(told.listener)
        await backend.ask(2)
        job = cluster.get("Job", f"{BASE}-w1")
        await until(lambda: len(cluster.pods()) == 2)
        cluster.end_pod(hosts(1, 2)[0])
        await told.until(lambda: bool(told.gone))
        cluster.make_pod(job, 0)  # as a controller that knows no limit for an index would
        path = "/api/v1/namespaces/ml/pods/" + cluster.pods()[hosts(1, 2)[0]]["metadata"]["name"]
        await until(lambda: ("DELETE", path) in cluster.seen)
        assert backend.hosts == [hosts(1, 2)[1]]
        await backend.leave()

    run(story)
