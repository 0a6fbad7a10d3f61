"""`doctor`: what is wrong with a loss or a step, ranked by the memory that mending it saves."""
