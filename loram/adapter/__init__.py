"""The adapter: attached to the pruned model, recovered to base shapes, merged onto the base."""
