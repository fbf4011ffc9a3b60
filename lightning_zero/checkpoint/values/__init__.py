"""Stand-ins for tensors in a checkpoint that is being written or read.

============== ====================================================================================
sharded_value  ``ShardedValue``: a tensor to be saved, of which each rank has a part
lazy_tensor    ``LazyTensor``: a tensor to be loaded, read only as far as it is used
read_on_use    what the two share: values are brought here when code uses them
places         where the values of a lazy tensor lie
boxes          ranges of a flat buffer as boxes of an n-d tensor: arithmetic
============== ====================================================================================
"""
