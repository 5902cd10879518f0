"""The third layer of tests: the real agents' commands, against a model server of our own on 127.0.0.1."""
