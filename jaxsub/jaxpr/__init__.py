"""From a function to a jaxpr and a graph, and what single equations are: FLOPs, identity, tangents, shardings."""
