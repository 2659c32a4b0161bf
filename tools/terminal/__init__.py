"""What the commands share: their options, opening a store, holding one to restore it, and printing."""
