"""A model as it is brought: what a call of it runs, what is wrapped around it, the state of torch it is met in."""
