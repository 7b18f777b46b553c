"""A graph and the model behind it: the graph module that keeps the user's class, its copies, what nodes carry."""
