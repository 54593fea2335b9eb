"""From events and counters to figures."""
