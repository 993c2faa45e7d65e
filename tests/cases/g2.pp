# G2: an exception is caught, and one op is left out for ever
group pp = 0-2

r0: F0; S F0->1; F1; S F1->1; F2; S F2->1
r1:
  R F0<-0
  F0
  S F0->2
  catch { R F1<-0; F1 { raise OutOfMemoryError "CUDA out of memory" }; S F1->2 }
  R F2<-0
  F2
  S F2->2
r2: R F0<-1; F0; R F1<-1; F1; R F2<-1; F2
