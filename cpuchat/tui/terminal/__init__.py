"""The terminal under the app: taken over, guarded against what the app writes, and given back whatever happens."""
