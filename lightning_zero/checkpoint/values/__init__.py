"""Stand-ins for tensors in a checkpoint that is being written or read.

============== ====================================================================================
sharded_value  ``ShardedValue``: a tensor to be saved, of which each rank has a part
deferred       ``Deferred``: a tensor to be saved that is put together when it is written
lazy_tensor    ``LazyTensor``: a tensor of a directory, read as far as it is asked for
origins        from a loaded tensor to the bytes of a file, and their checksums
chunk          one box of a tensor in a directory's file
boxes          ranges of a flat buffer as boxes of an n-d tensor: arithmetic
============== ====================================================================================
"""
