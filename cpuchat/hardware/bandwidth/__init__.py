"""How fast memory can be read: by the modules, and measured."""
