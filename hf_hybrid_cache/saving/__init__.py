"""What `prefix_store.nodes` needs of the format before; it goes with that."""
