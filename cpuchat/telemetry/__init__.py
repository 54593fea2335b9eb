"""From events and counters to figures; answers that are measured, in rounds."""
