{{/* Prefix of every object's name. */}}
{{- define "baton.fullname" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name }}{{ else }}{{ .Release.Name }}-{{ .Chart.Name }}{{ end }}
{{- end }}

{{/* Fails if an object's name is too long for what is made from it: of {name, most}, in characters. */}}
{{- define "baton.checkName" -}}
{{- if gt (len .name) (int .most) }}{{ fail (printf "%s has %d characters and may have %d: choose a shorter name for the release or the group" .name (len .name) (int .most)) }}{{ end }}
{{- end }}

{{/* Labels that select pods: of {root, component, group}; one of the last two may be left out. */}}
{{- define "baton.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- with .component }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- if .group }}
baton/group: {{ .group }}
{{- end }}
{{- end }}

{{/* Name and labels of an object: of {root, component, name}. */}}
{{- define "baton.metadata" -}}
name: {{ .name }}
labels:
  {{- include "baton.selector" . | nindent 2 }}
  app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
  app.kubernetes.io/managed-by: {{ .root.Release.Service }}
  helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{/* An option's value as the program reads it from the environment. */}}
{{- define "baton.value" -}}
{{- if kindIs "slice" . }}{{ join ";" . }}{{ else if kindIs "string" . }}{{ . }}{{ else if not (kindIs "invalid" .) }}{{ toJson . }}{{ end }}
{{- end }}

{{/* Variables of options: of a mapping from option to value. Empty values are left out. */}}
{{- define "baton.options" -}}
{{- range $name, $value := . }}
{{- with include "baton.value" $value }}
- name: BATON_OPT_{{ $name | upper | replace "-" "_" }}
  value: {{ . | quote }}
{{- end }}
{{- end }}
{{- end }}

{{/* Name of the TLS secret of a certificate's role: of {root, certificate}. */}}
{{- define "baton.tlsSecret" -}}
{{- if .root.Values.tls.certManager.enabled }}{{ include "baton.fullname" .root }}-{{ .certificate }}-tls{{ else }}{{ get .root.Values.tls.secrets .certificate }}{{ end }}
{{- end }}

{{/* HOST:PORT of etcd, separated by commas. */}}
{{- define "baton.etcd" -}}
{{- if .Values.etcd.development.enabled }}{{ include "baton.fullname" . }}-etcd:2379{{ else }}{{ join "," .Values.etcd.endpoints }}{{ end }}
{{- end }}

{{/* Options that follow from values and are the same for all services: of {root, certificate}, as YAML. */}}
{{- define "baton.commonOptions" -}}
{{- $values := .root.Values }}
etcd: {{ include "baton.etcd" .root }}
cluster: {{ $values.cluster }}
host: 0.0.0.0
metrics-port: 9464
health-port: 9463
{{- with $values.etcd.user }}
etcd-user: {{ . }}
etcd-password-file: /etc/baton/etcd-password/password
{{- end }}
{{- if $values.etcd.tlsSecret }}
etcd-ca: /etc/baton/etcd-tls/ca.crt
etcd-cert: /etc/baton/etcd-tls/tls.crt
etcd-key: /etc/baton/etcd-tls/tls.key
{{- end }}
{{- if $values.tls.enabled }}
tls-cert: /etc/baton/tls/tls.crt
tls-key: /etc/baton/tls/tls.key
tls-ca: /etc/baton/tls/ca.crt
{{- if or (ne .certificate "router") $values.tls.clientCertificates }}
tls-client-ca: /etc/baton/tls/ca.crt
{{- end }}
{{- else }}
insecure: "yes"
{{- end }}
{{- end }}

{{/* Volumes and where a container mounts them: of {root, certificate, volumes}, as YAML: a list of
     {name, path, readOnly, source}. */}}
{{- define "baton.volumes" -}}
{{- $values := .root.Values }}
- {name: tmp, path: /tmp, source: {emptyDir: {}}}
{{- if $values.tls.enabled }}
- {name: tls, path: /etc/baton/tls, readOnly: true, source: {secret: {secretName: {{ include "baton.tlsSecret" . }}}}}
{{- end }}
{{- with $values.etcd.tlsSecret }}
- {name: etcd-tls, path: /etc/baton/etcd-tls, readOnly: true, source: {secret: {secretName: {{ . }}}}}
{{- end }}
{{- if $values.etcd.user }}
- {name: etcd-password, path: /etc/baton/etcd-password, readOnly: true, source: {secret: {secretName: {{ $values.etcd.passwordSecret }}}}}
{{- end }}
{{- end }}

{{/* The model's volume, for routers and workers: an entry of "baton.volumes". */}}
{{- define "baton.modelVolume" -}}
{{- with .Values.model.volume }}
- {name: models, path: /models, readOnly: true, source: {{ toJson . }}}
{{- end }}
{{- end }}

{{/* Names of a router's ports for metrics, one for each of its processes, as YAML. */}}
{{- define "baton.routerMetrics" -}}
{{- $options := mergeOverwrite (deepCopy .Values.options) (deepCopy .Values.router.options) }}
- metrics
{{- range untilStep 2 (int (add 1 (get $options "router-processes" | int))) 1 }}
- metrics-{{ . }}
{{- end }}
{{- end }}

{{/* Fails for an option that pods, probes and Services follow only as the chart sets it: of an option's name to its
     value. */}}
{{- define "baton.checkOptions" -}}
{{- $fixed := "the chart's Services and probes are made for its own value" }}
{{- $own := dict
  "drain-timeout" "set drainSeconds, which pods' grace period follows" "cluster" "set cluster"
  "etcd" "set etcd.endpoints" "role" "set workers.NAME.role" "nnodes" "set workers.NAME.hosts"
  "node-rank" "set workers.NAME.hosts" "host" $fixed "port" $fixed "http-port" $fixed
  "health-port" $fixed "metrics-port" $fixed "advertise" $fixed }}
{{- range $name, $_ := . }}
{{- with get $own $name }}{{ fail (printf "options: leave %s out: %s" $name .) }}{{ end }}
{{- end }}
{{- end }}

{{/* A pod: of {root, component, certificate, settings, args, options, env, volumes, ports, probes,
     preStopSeconds}. `settings` are the component's values, `volumes` and `options` YAML. */}}
{{- define "baton.pod" -}}
{{- $values := .root.Values }}
{{- include "baton.checkOptions" $values.options }}
{{- include "baton.checkOptions" .settings.options }}
{{- $volumes := concat (include "baton.volumes" . | fromYamlArray) (.volumes | default "" | fromYamlArray) }}
{{- $options := mergeOverwrite (include "baton.commonOptions" . | fromYaml) (deepCopy $values.options) (.options | fromYaml) (deepCopy .settings.options) }}
automountServiceAccountToken: false
enableServiceLinks: false
terminationGracePeriodSeconds: {{ add $values.drainSeconds 20 }}
{{- with $values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .settings.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .settings.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
containers:
  - name: baton
    image: {{ $values.image.repository }}:{{ $values.image.tag | default .root.Chart.AppVersion }}
    imagePullPolicy: {{ $values.image.pullPolicy }}
    args:
      {{- toYaml .args | nindent 6 }}
    env:
      - name: POD_IP
        valueFrom: {fieldRef: {fieldPath: status.podIP}}
      - name: POD_NAME
        valueFrom: {fieldRef: {fieldPath: metadata.name}}
      {{- with .env }}
      {{- . | nindent 6 }}
      {{- end }}
      {{- with .settings.env }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
      {{- include "baton.options" $options | trim | nindent 6 }}
    ports:
      {{- range $name, $port := .ports }}
      - {name: {{ $name }}, containerPort: {{ $port }}}
      {{- end }}
      - {name: metrics, containerPort: 9464}
      - {name: health, containerPort: 9463}
    {{- with .probes }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- with .preStopSeconds }}
    lifecycle:
      preStop:
        sleep: {seconds: {{ . }}}
    {{- end }}
    resources:
      {{- toYaml .settings.resources | nindent 6 }}
    securityContext:
      allowPrivilegeEscalation: false
      readOnlyRootFilesystem: true
      capabilities: {drop: [ALL]}
    volumeMounts:
      {{- range $volumes }}
      - {name: {{ .name }}, mountPath: {{ .path }}{{ if .readOnly }}, readOnly: true{{ end }}}
      {{- end }}
volumes:
  {{- range $volumes }}
  - {{ merge (dict "name" .name) .source | toJson }}
  {{- end }}
{{- end }}

{{/* Spreads pods of a selector evenly over nodes: of {root, component, group, hash}. */}}
{{- define "baton.spread" -}}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "baton.selector" . | nindent 8 }}
    {{- if .hash }}
    matchLabelKeys: [pod-template-hash]
    {{- end }}
{{- end }}

{{/* A budget of one pod that may be away, of a group leaders and ranks: of {root, component, group, name}. */}}
{{- define "baton.disruptionBudget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "baton.metadata" . | nindent 2 }}
spec:
  maxUnavailable: 1
  selector:
    matchLabels:
      {{- include "baton.selector" (.group | empty | ternary . (omit . "component")) | nindent 6 }}
{{- end }}

{{/* HTTP probe at the health port, which never uses TLS: of {path, periodSeconds, failureThreshold}. */}}
{{- define "baton.probe" -}}
httpGet: {path: {{ .path }}, port: health}
periodSeconds: {{ .periodSeconds | default 5 }}
timeoutSeconds: 5
failureThreshold: {{ .failureThreshold | default 3 }}
{{- end }}
