"""How often each proposer is right along recorded text: a figure that does not move with the machine's speed, so that CI can hold it."""
