"""Everything that calls llama.cpp. Used by the worker process only."""
