"""What every layer may use: errors, documents, settings, fingerprints."""
