"""Plain data, without JAX: budgets, the graph, the chain that planners see, plans, and how a plan is simulated."""
