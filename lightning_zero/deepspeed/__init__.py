"""DeepSpeed's configurations and checkpoints, read as the strategy's arguments and plain files.

=============== ===================================================================================
config          a configuration, as arguments of the strategy and demands on the Trainer
keys            the keys of a configuration, and what becomes of each
optimizer_block the blocks ``optimizer`` and ``scheduler``, as torch's classes
checkpoint      a ZeRO checkpoint, as the one that DDP would have written
files           the files of a checkpoint, by rank, and what they hold
flat_vectors    masters and states on flat vectors, cut as stages 1, 2 and 3 cut them
placeholder     unpickling with inert objects in place of unknown classes
=============== ===================================================================================
"""

from lightning_zero.deepspeed.checkpoint import DeepSpeedFolder
from lightning_zero.deepspeed.config import Config
from lightning_zero.deepspeed.files import CannotConvert, files_of, is_deepspeed_folder
from lightning_zero.deepspeed.keys import KEYS, Fate, Kind, table
from lightning_zero.deepspeed.optimizer_block import OptimizerBlock, SchedulerBlock
