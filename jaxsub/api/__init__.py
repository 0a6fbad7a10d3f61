"""The public calls: `sublinear`, `plan`, `measure`, `frontier`, `explain`, and the timeline of the compiler."""
