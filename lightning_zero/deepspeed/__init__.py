"""DeepSpeed's configurations, read as arguments of the strategy and of the Trainer.

- ``config``: a configuration, by key: those that act, those that are refused, and the rest
- ``optimizer_block``: the blocks ``optimizer`` and ``scheduler``, as torch's classes
"""

from lightning_zero.deepspeed.config import ACTING, REFUSED, Config
from lightning_zero.deepspeed.optimizer_block import OptimizerBlock, SchedulerBlock
