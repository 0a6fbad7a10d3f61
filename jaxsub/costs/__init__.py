"""The cost model: from a traced stage to the bytes, FLOPs and seconds of its options, and to a `Chain`."""
