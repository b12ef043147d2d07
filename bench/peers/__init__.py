"""The same prompts on other engines, in turns with ours. The workers run in an environment of their own and import nothing of ours but `lines`."""
