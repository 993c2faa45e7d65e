# F2: a batch of 8 in 3 microbatches: 3, 3 and 2 rows
group pp = 0-2

r0: S F0->1 [f32 3x8]; S F1->1 [f32 3x8]; S F2->1 [f32 2x8]
r1:
  R F0<-0 [f32 3x8]
  F0
  S F0->2 [f32 3x8]
  R F1<-0 [f32 3x8]
  F1
  S F1->2 [f32 3x8]
  R F2<-0 [f32 3x8]
  F2
  S F2->2 [f32 3x8]
r2: R F0<-1 [f32 3x8]; F0; R F1<-1 [f32 3x8]; F1; R F2<-1 [f32 3x8]; F2
