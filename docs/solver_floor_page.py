"""The part of `solver_benchmarks.md` without rows: what was tried by hand at the floor."""

TEXT = """\
## Who is wrong at the floor

Both, by about as much. ViT with three layers at its floor, all sets of values searched (those below
200 kB count as kept, and a value that one rerun alone reads is made with it): 231.7 ms. The
solver's plan took 242.2 ms, its bound was 220.6 ms. With two layers the plan is the best one, and
the bound 0.6 % below it.

- *The plan* keeps what enters a layer at the one moment with room for one value. The best one keeps
  what enters the MLP, and makes the MLP's large value twice. CP-SAT on the whole step, with the
  solver's plan as a hint, found nothing better in 120 s. The search that did goes back from the end
  over sets of values that are needed: 52 thousand for two layers, 1.6 million for three. Keeping
  only the fastest sets of each size at each position, it ends without a plan with 100 of them; with
  300 it finds 97.0 ms of reruns, where the best is 73.6 ms.
- *The bound* has cuts two positions apart in the tail, none where attention takes the most. With
  three layers and a cut at each peak its program gives 63.9 ms of reruns, as with a cut at every
  position. In whole columns it gives 70.9 ms, which branching proves in 2 s: 1 % of the step is
  missing then, 4 % in the linear program.
- *Cuts that stand apart* (12 positions, then 8, 4 and 2) and half as much work again bring the gap
  of GPT-2 to 6.0, of ViT to 5.6 and of ResNet-50 to 4.6 %, of the others by 0 to 0.4 points. Not
  used: half as many seconds again, and Mixtral's gap at 35 % grows by 0.3 points.
  58 cuts for ViT give 29.9 % in 32 s, two cuts in each layer of BERT 47.1 % in 22 s.
- *Blocks of windows*, not used: rows between blocks are paid for at their prices in the linear
  program, and each block is branched on by itself. In 0.4 to 6 s that raises ViT by 0.3 to 0.6
  points, BERT by 0.1 to 0.7, GPT-2 by less than 0.1. Two blocks of ViT with three layers give 65.6
  of the 70.9 ms.

What was measured before, on earlier captures of these graphs; figures are extra time, one thread.

- *More cuts, and their programs solved to the end.* ViT reaches 27.6 % with 28 cuts in 2 s, and no
  more with 42 or 63; GPT-2 of 12 blocks 32.6 % with 27 cuts and with 40; BERT 43.0 % with 33 cuts
  in 7 s, and 45.1 % with 49 in 34 s; Mixtral 43.9 % with 9 and 44.0 % with 13; T5 39.9 % with 45.
  The simplex method from its last basis takes a third of the interior point method's time.
- *Whole columns.* HiGHS's own integer search on ResNet-50's program with 15 cuts ends at 53.8 %
  (51.5 % linear) in 1 s. For ViT with 19 cuts it proves 26.5 % (25.3 % linear) in 20 s, and has a
  point at 28.0 %: no bound from these cuts and rows is above that. BERT, 24 cuts: 42.6 % (42.0 %),
  a point at 44.1 %. GPT-2, 21 cuts: 29.9 % (29.4 %), at 30.3 %. Mixtral, 9 cuts: 44.0 % (43.5 %),
  at 45.8 %.
- *Branching, which is used*: 53.7 % for ResNet-50; in 12 s 1 point for ViT with 19 cuts, which more
  cuts give sooner. One column raises both halves by 0.2 % at most in ViT, by 1.4 % in ResNet-50.
  Rows looked for at every leaf took twice the time for 0.1 points.
- *Eight times the effort of ruin and repair* from the plan at the floor: ResNet-50 57.9 % in place
  of 61.0 %, BERT 58.2 % in place of 60.7 %, GPT-2 40.8 % in place of 41.7 %, Mixtral 55.4 % in
  place of 55.8 %, T5 50.9 % in place of 51.0 %, in 27 to 50 s each.
- *More effort in the stage that quickens the smallest peak*. From 6 to 9 million operations: BERT
  61.8 % in place of 62.5 %, GPT-2 40.4 % in place of 40.8 %, T5 52.6 % in place of 53.1 %. From 9
  to 18, which is used since: ResNet-50 61.3 % in place of 65.4 %, Mixtral 58.5 % in place of
  61.5 %, BERT 59.8 % in place of 61.8 %, GPT-2 of 48 layers 34.6 % in place of 36.2 %, Llama of 16
  layers 34.0 % in place of 35.5 %, the other five the same; a quarter to a half more of the
  processor's seconds. With 13.5 BERT is at 62.6 %: where a race ends is luck, too.
- *Half as much again for the search for the smallest peak*, which is used since: ViT comes to 11.0
  in place of 11.2 % of the baseline's peak, and to 42.4 in place of 43.8 %.

What is missing is a bound that sees whole values in many windows at once, and a search that changes
what is kept in several layers at once.
"""
