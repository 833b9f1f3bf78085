"""The two papers' clusters, what was fitted to their figures, and their figures by the planner.

Goyal et al. 2017 (arXiv 1706.02677): P100, 8 a host, NVLink inside, 50 Gbit/s Ethernet between,
32 images a GPU, 120 ms of backward, float32 gradients. Yamazaki et al. 2019 (arXiv 1903.12650):
2,048 V100 of the ABCI cluster, 4 a host, two EDR InfiniBand links (200 Gbit/s) between, 40 images
a GPU, half-precision gradients.

Fitted, each to one figure:
    P100, a step alone          207.5 ms    29 hours for 90 epochs on 8 GPUs
    variation of computing      8.14 %      90 % from 8 to 256 GPUs; it stands for all that grows
                                            with the number of GPUs and is not modelled
    latency between hosts       68 us       halving/doubling 3 times faster than the ring on 32
                                            hosts, taken as at 10^6 elements, the largest size
                                            for which the paper has it faster
    V100, images a second alone 1,097       1.73 M images/s and 77.0 %, which together say so

Assumed, as the papers do not say: 40 GB/s and 10 us inside a P100 host, 100 GB/s and 10 us inside a
V100 host, 5 us between those, two thirds of a V100's step for backward, buckets of 8 and 4 MiB,
4 in flight. From half to three times of any of them moves no prediction by more than 1 %.

Everything else is predicted; above all the 77 % on 2,048 V100, from the variation that was fitted
to 256 P100 of another cluster. Of the papers' figures one cannot be had with the others: 40,000
images/s on 256 GPUs are 113 % of 32 times what 29 hours on 8 say, and 90 epochs in 48 minutes
instead of an hour. On 352 GPUs, for which the paper has 30 s an epoch, they are what is planned
there (within 10 %).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from _plan_models import profile_of
from _plan_rows import RunSettings, Setup, gradients_of, row_of

from tf_largebatch.core.cost_model import LinkCost
from tf_largebatch.core.scaling_plan import ReplicaWork, all_reduce_seconds

IMAGENET = RunSettings(
    num_examples=1_281_167,
    epochs=90,
    base_learning_rate=0.1,
    base_batch_size=256,
    warmup_epochs=5.0,
)
VARIATION = 0.0814
P100_BACKWARD_SECONDS = 0.120
P100_REST_SECONDS = 0.0875
_V100_IMAGES_PER_SECOND = 1.73e6 / 0.770 / 2048
_V100_BACKWARD_SHARE = 2 / 3
_V100_HOSTS, _V100_PER_HOST, _V100_IMAGES = 512, 4, 40
_ACCEPTED = 0.10


def goyal_setup() -> Setup:
    """Of Goyal et al.: ResNet-50 on hosts of 8 P100."""
    return Setup(
        work=ReplicaWork(
            images=32,
            before_seconds=P100_REST_SECONDS,
            backward_seconds=P100_BACKWARD_SECONDS,
            variation=VARIATION,
        ),
        gradients=gradients_of(profile_of("resnet50"), item_bytes=4),
        replicas_per_host=8,
        inside=LinkCost(latency_seconds=10e-6, seconds_per_byte=1 / 40e9),
        between=LinkCost(latency_seconds=68e-6, seconds_per_byte=8 / 50e9),
        bucket_bytes=8 * 2**20,
        max_buckets_in_flight=4,
        algorithm=None,
        run=IMAGENET,
    )


def yamazaki_setup() -> Setup:
    """Of Yamazaki et al.: ResNet-50 on hosts of 4 V100."""
    seconds = _V100_IMAGES / _V100_IMAGES_PER_SECOND
    return replace(
        goyal_setup(),
        work=ReplicaWork(
            images=_V100_IMAGES,
            before_seconds=seconds * (1 - _V100_BACKWARD_SHARE),
            backward_seconds=seconds * _V100_BACKWARD_SHARE,
            variation=VARIATION,
        ),
        gradients=gradients_of(profile_of("resnet50"), item_bytes=2),
        replicas_per_host=_V100_PER_HOST,
        inside=LinkCost(latency_seconds=10e-6, seconds_per_byte=1 / 100e9),
        between=LinkCost(latency_seconds=5e-6, seconds_per_byte=8 / 200e9),
        bucket_bytes=4 * 2**20,
    )


@dataclass(frozen=True)
class Figure:
    """One figure of a paper.

    Args:
        name: what it is.
        paper: its value there.
        planned: by the planner.
        kind: "fitted"; "predicted"; or "contradicts", of one that the paper's others exclude.
    """

    name: str
    paper: float
    planned: float
    kind: str

    @property
    def deviation(self) -> float:
        return self.planned / self.paper - 1.0

    @property
    def is_met(self) -> bool:
        return abs(self.deviation) <= _ACCEPTED


def paper_figures() -> list[Figure]:
    """All of them, with what the planner says."""
    goyal, yamazaki = goyal_setup(), yamazaki_setup()
    on_8, on_256, on_352 = (row_of(goyal, hosts) for hosts in (1, 32, 44))
    on_2048 = row_of(yamazaki, _V100_HOSTS)
    million = {
        name: all_reduce_seconds(
            replace(goyal.cluster(32), replicas_per_host=1),
            size_bytes=4e6,
            algorithm=name,  # type: ignore[arg-type]
        )
        for name in ("ring", "halving_doubling")
    }
    return [
        Figure("8 P100: hours for 90 epochs", 29.0, on_8["hours"], "fitted"),
        Figure(
            "256 P100: efficiency to 8, %",
            90.0,
            100 * on_256["efficiency_to_one_host"],
            "fitted",
        ),
        Figure(
            "32 hosts: halving/doubling against ring, times",
            3.0,
            million["ring"] / million["halving_doubling"],
            "fitted",
        ),
        Figure(
            "256 P100: peak network rate, Gbit/s",
            12.8,
            on_256["network_gbit_per_second"],
            "predicted",
        ),
        Figure("256 P100: hours for 90 epochs", 1.0, on_256["hours"], "predicted"),
        Figure("352 P100: seconds an epoch", 30.0, on_352["epoch_seconds"], "predicted"),
        Figure("352 P100: images/s", 40e3, on_352["images_per_second"], "predicted"),
        Figure("256 P100: images/s", 40e3, on_256["images_per_second"], "contradicts"),
        Figure("2,048 V100: efficiency to one, %", 77.0, 100 * on_2048["efficiency"], "predicted"),
        Figure(
            "2,048 V100: images/s, by a V100's rate alone",
            1.73e6,
            on_2048["images_per_second"],
            "predicted",
        ),
    ]
