"""The only folder that uses process groups: a control plane, and transports for the data.

communicator      holds both planes and chooses the transports
control           control plane: objects, sums, sync points, errors that all ranks raise
transport         data plane: messages (gloo), collectives (NCCL)
shared_memory     transport of ranks that share one host's CPUs
coded             transport of quantized weights and gradients
hosts             the network interface between hosts, and the detection of lost ones
mesh              axes of ranks: shards, replicas
tensor_parallel   torch's device mesh, parameters as DTensors, the plans of Transformers
traffic           ledger of what was sent, and of the time of steps with offload
watchdog          the collectives of this rank, and what ends a run when one never ends: begin here
process_groups    one process group per purpose; the default group after a restart by torchrun
"""

from lightning_zero.comm.coded import Codec
from lightning_zero.comm.communicator import Communicator
from lightning_zero.comm.control import (
    Control,
    Outcome,
    Pending,
    SyncPoint,
    agreed,
    with_complements,
)
from lightning_zero.comm.hosts import towards
from lightning_zero.comm.mesh import Axis, Mesh
from lightning_zero.comm.process_groups import default_group, default_world_size, enter_group
from lightning_zero.comm.tensor_parallel import (
    DTensorForm,
    cut_by_own_plan,
    data_group,
    device_mesh,
    is_dtensor,
    parameter_behind,
    pretended_mesh,
    reads_parts,
    share,
    whole,
)
from lightning_zero.comm.traffic import Ledger, Sent, StepTimes, Traffic, sum_of
from lightning_zero.comm.transport import (
    Extent,
    Shards,
    sum_into,
    weights_of,
)
from lightning_zero.comm.watchdog import end_at_exit, listed
