"""The only folder that knows torch.distributed: a control plane, and transports for the data.

communicator      holds both planes and chooses the transports
control           control plane: objects, sums, sync points, the store
sync_points       the points of a step that all ranks reach together
agreement         an error on one rank raised on all; room on disks for the files of all
transport         data plane: the interface of all transports
point_to_point    messages between each pair of ranks (gloo)
one_host          what exists only for ranks that share one host's CPUs
collectives       the backend's own collectives (NCCL)
codec             quantization to few bits
coded             transport of quantized weights and gradients
mesh              axes of ranks: shards, replicas
tensor_parallel   torch's device mesh, and parameters as DTensors
own_plan          how models of Transformers say that they are cut
traffic           ledger of what was sent, and of the time of steps with offload
collective_log    the collectives that this rank has begun, and the one it waits for
watchdog          ends a run on all ranks, with one error, when one cannot go on: begin here
reports           the ranks' notes for each other, in the store
process_groups    one process group per purpose
rendezvous        the default group after a restart by torchrun
"""

from lightning_zero.comm.agreement import Outcome, agreed, require_room
from lightning_zero.comm.codec import Codec
from lightning_zero.comm.coded import Cargo
from lightning_zero.comm.communicator import Communicator
from lightning_zero.comm.control import Control
from lightning_zero.comm.mesh import Axis, Mesh
from lightning_zero.comm.own_plan import cut_by_own_plan, reads_parts
from lightning_zero.comm.process_groups import default_group, default_world_size
from lightning_zero.comm.rendezvous import enter_group
from lightning_zero.comm.sync_points import PendingSync, SyncPoint, with_complements
from lightning_zero.comm.tensor_parallel import (
    DTensorForm,
    data_group,
    device_mesh,
    is_dtensor,
    parameter_behind,
    pretended_mesh,
    share,
    unwrapped,
    whole,
)
from lightning_zero.comm.traffic import Ledger, Sent, StepTimes, Traffic, sum_of
from lightning_zero.comm.transport import (
    Extent,
    Pending,
    ReduceBuffer,
    Shards,
    sum_into,
    weights_of,
)
from lightning_zero.comm.watchdog import end_at_exit
