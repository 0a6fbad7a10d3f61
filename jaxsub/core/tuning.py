"""The constants that steer planning, each with what it was derived from.

They decide how long planning takes and what it looks at, never what a plan may promise: a budget is kept whatever they
are. Constants that describe a compiler or a device stand with what they describe (`jaxsub.costs`, `jaxsub.devices`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """What planning looks at, and when it has looked enough.

    Attributes:
        most_stages: Stages of a chain; the dynamic program's time grows with their cube, and more gain little: what a
            region saves between its ends is an option of each stage.
        stage_equations: Up to so many equations. A compile's time grows with their number, so of more equations there
            may be more stages, by the cube root, and tables take no larger part of the time,
        longest_chain: up to so many: as tables of more are coarser, since all may take a quarter of a GiB.
        region_equations: Equations in a region of several stages, where stages were merged for being too many, or every
            run of them may be a region: to trace the gradients of more is what planning would spend its time on.
        few_stages: Up to so many stages every run of them may be one region.
        few_costly: With fewer products and convolutions a program is cut between all nodes that compute anything.
        region_sizes: Stages in the regions of several stages that planners see.
        long_chain: From so many stages on tables, partitions and steps of the frontier are what takes time.
        natural_share: Of a forward pass that may be recomputed without a budget; the last tenth would buy little.
        deepest: Levels of nesting: JAX traces each in about 17 of the 1,000 nested calls that Python allows.
        alike: Plans whose FLOPs differ by less count as equally fast,
        fewer: and of them one with at most this share of the regions is taken if it needs no more memory.
        block_ratios: Between neighbouring sizes of a scan's blocks, for one, two and three levels of blocks.
        kept_shares: Of a scan's steps that may stand outside all blocks.
        inner_ranks: Ways to run the loops inside a body that are combined with those of the loop itself.
        unrolled_equations: A scan's steps are written out up to so many equations.
        unrolled_stages: Stages of a loop that is written out: fewer, since it is planned beside all ways to leave it a
            loop, and for each number of slices. By the cube they take less than half the time.
        much_less: What a plan inside a body, or one that writes out a loop, must need of the next best to be looked at.
        body_plans: Plans inside a body that are combined with the ways to run its loop.
        body_slots: Slots in which they are planned: one is far less than they must differ by (`much_less`).
        compile_gain: What another compile must spare, as a share of a forward pass: 1 % of a gradient's FLOPs.
        usual_compiles: Of so many compiles each must spare that, of more each twice as much as the one before: users
            wait for a few compiles of the plain program, not for a dozen.
        fitting: What a plan that fits is worth where none does: a forward pass more than full recomputation costs.
        partition_gain: What another partition must spare: .3 % of a gradient's FLOPs; finer ones have more barriers. As
            much may be recomputed for a plan that leaves room, until one is measured.
        large_stage: Stages that take this share of the budget are cut as finely as any partition cuts them.
        least_slack: A plan that needs this share more than the least may recompute far less.
        most_compiles: Whole programs that are compiled in one search.
        by_hand_compiles: Plans by hand that are: first the one with the largest expected gain, or, where nothing fits
            yet, the one predicted least; then the cheapest that fit by what was measured, for what plans by hand have
            in common, as a loss head, errs alike.
        long_equations: Programs of more are not compiled again only to look for something better than what fits.
        budget_margin: Share of the budget to aim below it; without it the search creeps up on the budget.
        heavy_recompute: Where only a least plan fits, and it recomputes more than this share of a forward pass, plans
            between it and the budget are tried.
        median_error: By so much predictions err in the median (`examples/results/prediction`), as often too low as too
            high: a plan that is predicted to need so much more than the budget fits one time in four.
        by_hand_error: The same of plans by hand on a CPU, where XLA's versions store bfloat16 otherwise; for an H100 it
            is the median above (decoders of `examples/results/by_hand`).
        least_probability: A plan by hand is compiled where the probability that it fits is at least this, or where the
            gain times that probability is what alone would be worth a compile.
        prediction_error: By so many times predictions err at worst. A plan leaves no more room than that.
        least_compiles: Least plans that are compiled before a refusal.
        packing: Partitions on which the least is predicted within this share of the lowest may hold the least: the
            compiler's packing of buffers adds as much to what is live.
        plain_near: Where the plain program is predicted to need no more than this times the budget it is compiled
            before any plan,
        plain_far: up to this where plans recompute something, beyond it never. Predictions err by 3 % in the median and
            by less than 30 % at worst (`examples/results/prediction`); of a few small layers by two thirds.
        between_compiles: Plans that are tried before a refusal, between what the least is predicted to need and what
            it does,
        between_gap: where these are this share apart. Room below a budget is found to this share of it.
        bracket_share: The next quantity lies at least this share of a bracket away from its ends: a line that is nearly
            flat says little.
        bracket_leap: Without a slope, how many times larger the next quantity is at most.
        block_flops: What repeats is taken for the program's blocks where it holds this share of the FLOPs.
        little_recompute: A plan that recomputes no more of a forward pass is taken without looking at slices.
        slice_sets: Sets of runs in slices that are planned with the compiler, before the best is taken or all refused.
        slice_corrections: Most plans of one slice between the largest and the least, and most refused ones compiled.
        wide_values: How many of the widest values are looked at.
        wide_share: A run is worth slicing where more is live than this share of the budget,
        peak_share: or this share of the program's own peak; what carries the axis is sliced down to `wide_share`.
        narrow_share: Several values of a run are live at once: each is looked at that is this share of what is wide.
        run_reach: A run reaches to where one part in so many of its widest value is live.
        least_sliced_bytes: Less is sliced only where nothing else fits.
        light_equations: Of at most so many cheap equations a total is made before slices, where they run again.
        many_slices: Of axes that all have so many slices the one is taken that most of the run carries.
        hill_share: What was last read in this first part of an inner forward pass waits for the inner backward pass.
        waiting_share: What waits so must be this share of what is alive between the two for runs to be recomputed.
        little_share: A run that spares less than this share of it is not recomputed. What a cut makes XLA
            materialise is no reason against it below this share of what crosses it.
        same_step: Where a step needs this share of what is predicted of its largest function, a byte of a function's
            budget is one of the step.
        close_step: A step that fills this share of its memory is close enough.
    """

    most_stages: int = 128
    stage_equations: int = 2**12
    longest_chain: int = 256
    region_equations: int = 500
    few_stages: int = 8
    few_costly: int = 4
    region_sizes: tuple[int, ...] = (2, 4, 8)
    long_chain: int = 64
    natural_share: float = 0.9
    deepest: int = 12
    alike: float = 0.005
    fewer: float = 0.8
    block_ratios: tuple[float, ...] = (math.sqrt(2), 2.0, 4.0)
    kept_shares: tuple[float, ...] = tuple(i / 12 for i in range(1, 12))
    inner_ranks: int = 4
    unrolled_equations: int = 512
    unrolled_stages: int = 96
    much_less: float = 0.85
    body_plans: int = 8
    body_slots: int = 128
    compile_gain: float = 0.03
    usual_compiles: int = 4
    fitting: float = 2.0
    partition_gain: float = 0.009
    large_stage: float = 0.25
    least_slack: float = 1e-3
    most_compiles: int = 6
    by_hand_compiles: int = 4
    long_equations: int = 10_000
    budget_margin: float = 0.003
    heavy_recompute: float = 0.5
    median_error: float = 0.03
    by_hand_error: float = 0.08
    least_probability: float = 0.25
    prediction_error: float = 1.2
    least_compiles: int = 2
    packing: float = 0.12
    plain_near: float = 1.05
    plain_far: float = 1.7
    between_compiles: int = 2
    between_gap: float = 0.01
    bracket_share: float = 0.1
    bracket_leap: int = 16
    block_flops: float = 0.5
    little_recompute: float = 0.05
    slice_sets: int = 3
    slice_corrections: int = 4
    wide_values: int = 6
    wide_share: float = 1 / 8
    peak_share: float = 1 / 2
    narrow_share: float = 1 / 4
    run_reach: int = 4
    least_sliced_bytes: int = 2**20
    light_equations: int = 16
    many_slices: int = 64
    hill_share: float = 0.75
    waiting_share: float = 0.25
    little_share: float = 0.01
    same_step: float = 0.8
    close_step: float = 0.96

    def stages(self, n_equations: int) -> int:
        """The most stages of a program of so many equations.

        Example:
            >>> TUNING.stages(1_000), TUNING.stages(2**15), TUNING.stages(10**6)
            (128, 256, 256)
        """
        wanted = round(self.most_stages * math.cbrt(n_equations / self.stage_equations))
        return min(max(wanted, self.most_stages), self.longest_chain)


TUNING = Tuning()
"""What is in force."""
